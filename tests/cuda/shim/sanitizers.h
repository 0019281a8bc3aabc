// What the sanitizers must be told of fibers. Nothing in builds without them.
//
// ThreadSanitizer is the race checker: each CUDA thread is a TSan fiber, the scheduler's own accesses are not watched,
// and only __syncthreads and __syncwarp order memory (shuffles and votes do not, as the CUDA manual says).
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace spectrumkv::shim {

inline void Unwatch() {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}
inline void Watch() {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
}

// While one lives, accesses of this thread are not watched.
struct Unwatched {
  Unwatched() { Unwatch(); }
  ~Unwatched() { Watch(); }
};

// What came before Release(p) happened before what comes after Acquire(p).
inline void Release([[maybe_unused]] void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(p);
#endif
}
inline void Acquire([[maybe_unused]] void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(p);
#endif
}

// A stack that will be used anew: frames that never returned left their marks on it.
inline void CleanStack([[maybe_unused]] char* stack, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, bytes);
#endif
}

// A stack as the sanitizers know it.
struct StackMarks {
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* fake = nullptr;
  void* tsan = nullptr;
};

// Switching: by an Unwatched, unless dying. Whoever waits is watched, as no fiber may be destroyed that is not.
inline void BeforeSwitch([[maybe_unused]] StackMarks* from, [[maybe_unused]] const StackMarks& to,
                         [[maybe_unused]] bool dying) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(dying ? nullptr : &from->fake, to.bottom, to.bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  void* const fiber = to.tsan;
  if (!dying) Watch();
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
#endif
}

// `left`: where it came from, learned the first time, when nothing is unwatched yet.
inline void AfterSwitch([[maybe_unused]] const StackMarks& here, [[maybe_unused]] StackMarks* left) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(here.fake, left == nullptr ? nullptr : &left->bottom,
                                  left == nullptr ? nullptr : &left->bytes);
#endif
  if (left == nullptr) Unwatch();
}

}  // namespace spectrumkv::shim

#include "tests/cuda/shim/context.h"

#include <cstdint>

#if defined(__x86_64__)

// Keeps what the calling convention says a call keeps; the rest the compiler has saved around the call.
extern "C" void spectrumkv_switch_stack(void** save, void* load);
asm(R"(
.text
.globl spectrumkv_switch_stack
.type spectrumkv_switch_stack, @function
spectrumkv_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size spectrumkv_switch_stack, .-spectrumkv_switch_stack
)");

namespace spectrumkv::shim {

void MakeContext(Context* context, char* stack, size_t bytes, void (*entry)()) {
  // Six registers and the address to return to; above it the stack is as a call leaves it, 8 off a multiple of 16.
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16;
  auto* words = reinterpret_cast<uintptr_t*>(top - 16 - 6 * 8);
  for (int i = 0; i < 6; ++i) words[i] = 0;
  words[6] = reinterpret_cast<uintptr_t>(entry);
  words[7] = 0;
  *context = words;
}

void SwitchContext(Context* from, Context* to) { spectrumkv_switch_stack(from, *to); }

}  // namespace spectrumkv::shim

#else

namespace spectrumkv::shim {

void MakeContext(Context* context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}

void SwitchContext(Context* from, Context* to) { swapcontext(from, to); }

}  // namespace spectrumkv::shim

#endif

#include "tests/cuda/fake/fake_runtime.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tests/cuda/fake/fake_kernels.h"

namespace spectrumkv::testing {

using gpu::CallStatus;
using gpu::DeviceStream;
using gpu::LaunchStatus;

FakeRuntime::FakeRuntime(FakeOptions options)
    : options_(options), rng_(options.seed), device_([this] { Run(); }) {}

FakeRuntime::~FakeRuntime() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  device_.join();
}

std::string FakeRuntime::Uuid(int device) {
  char text[64];
  std::snprintf(text, sizeof(text), "GPU-face0000-0000-0000-0000-0000000000%02x", device);
  return text;
}

void FakeRuntime::Fail(const std::string& call, int error, int good, bool late, bool always) {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_[call].push_back({error, good, late, always});
}

void FakeRuntime::ForgetFailures() {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.clear();
}

void FakeRuntime::Revive() {
  std::lock_guard<std::mutex> lock(mutex_);
  sticky_ = 0;
}

bool FakeRuntime::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sticky_ != 0;
}

void FakeRuntime::DropQueues() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->queue.clear();
}

std::vector<std::string> FakeRuntime::violations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return violations_;
}

std::map<std::string, int> FakeRuntime::calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

std::set<int> FakeRuntime::contexts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return contexts_;
}

uint64_t FakeRuntime::turns() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return turns_;
}

void FakeRuntime::Violate(const std::string& what) {
  std::fprintf(stderr, "fake device: %s\n", what.c_str());
  std::lock_guard<std::mutex> lock(mutex_);
  violations_.push_back(what);
}

int FakeRuntime::Called(const std::string& call, int* late) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[call];
  auto& failures = failures_[call];
  int error = sticky_;
  if (!failures.empty() && failures.front().good-- <= 0) {
    const Failure failure = failures.front();
    if (failure.always) {
      failures.front().good = 0;
    } else {
      failures.pop_front();
    }
    if (failure.late && late != nullptr) {
      *late = failure.error;
    } else {
      error = failure.error;
    }
  }
  if (gpu::IsSticky(error)) sticky_ = error;
  return error;
}

int FakeRuntime::CalledOn(int device, const std::string& call, int* late) {
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    first = contexts_.insert(device).second;
  }
  if (first) Violate(call + " makes a context on device " + std::to_string(device));
  return Called(call, late);
}

CallStatus FakeRuntime::Told(int error) const {
  return error == 0 ? CallStatus{} : CallStatus{error, "fakeError", "as the test asked for"};
}

CallStatus FakeRuntime::CountDevices(int* devices) {
  const int error = Called("CountDevices");
  *devices = error == 0 ? options_.devices : 0;
  return Told(error);
}

CallStatus FakeRuntime::Describe(int device, gpu::DeviceProperties* properties) {
  if (const int error = Called("Describe")) return Told(error);
  if (device < 0 || device >= options_.devices) return Told(gpu::kInvalidDevice);
  std::snprintf(properties->name, sizeof(properties->name), "fake device %d", device);
  properties->uuid[0] = 0xFA;
  properties->uuid[1] = 0xCE;
  properties->uuid[15] = static_cast<uint8_t>(device);
  properties->compute_major = 9;
  properties->total_bytes = options_.device_bytes;
  return CallStatus{};
}

CallStatus FakeRuntime::FreeBytes(int device, uint64_t* free_bytes) {
  *free_bytes = options_.device_bytes;
  return Told(CalledOn(device, "FreeBytes"));
}

CallStatus FakeRuntime::MakeContext(int device, gpu::ContextCost* cost) {
  if (const int error = Called("MakeContext")) return Told(error);
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    first = contexts_.insert(device).second;
  }
  *cost = {first ? options_.context_bytes.value_or(0) : 0, options_.context_bytes.has_value()};
  return CallStatus{};
}

CallStatus FakeRuntime::Allocate(int device, uint64_t bytes, void** memory) {
  if (const int error = CalledOn(device, "Allocate")) return Told(error);
  *memory = bytes <= options_.device_bytes ? memory_.Allocate(FakeMemory::Kind::kDevice, bytes) : nullptr;
  return Told(*memory == nullptr ? gpu::kOutOfMemory : 0);
}

CallStatus FakeRuntime::AllocatePinned(int device, uint64_t bytes, void** memory) {
  if (const int error = CalledOn(device, "AllocatePinned")) return Told(error);
  *memory = memory_.Allocate(FakeMemory::Kind::kPinned, bytes);
  return Told(*memory == nullptr ? gpu::kOutOfMemory : 0);
}

CallStatus FakeRuntime::FreeUnused(int device, const std::string& call, FakeMemory::Kind kind, void* memory) {
  // A call that fails frees nothing, but whoever made it has forgotten the memory: only then may it stay.
  if (const int error = CalledOn(device, call)) return Told(error);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    for (const auto& stream : streams_) {
      for (const Op& op : stream->queue) {
        if (std::find(op.uses.begin(), op.uses.end(), begin) == op.uses.end()) continue;
        violations_.push_back(call + " of memory that a queued " + op.name + " uses");
      }
    }
  }
  if (!memory_.Release(kind, memory)) {
    Violate(call + " of memory that is not allocated");
    return Told(gpu::kInvalidValue);
  }
  return CallStatus{};
}

CallStatus FakeRuntime::Free(int device, void* memory) {
  return FreeUnused(device, "Free", FakeMemory::Kind::kDevice, memory);
}
CallStatus FakeRuntime::FreePinned(int device, void* memory) {
  return FreeUnused(device, "FreePinned", FakeMemory::Kind::kPinned, memory);
}
CallStatus FakeRuntime::CloseMemory(int device, void* memory) {
  return FreeUnused(device, "CloseMemory", FakeMemory::Kind::kDevice, memory);
}
CallStatus FakeRuntime::Unpin(int device, void* memory) {
  return FreeUnused(device, "Unpin", FakeMemory::Kind::kPinned, memory);
}
CallStatus FakeRuntime::DestroyEvent(int device, gpu::Event event) {
  return FreeUnused(device, "DestroyEvent", FakeMemory::Kind::kPinned, event);
}

CallStatus FakeRuntime::Pin(int device, void* memory, uint64_t bytes) {
  if (const int error = CalledOn(device, "Pin")) return Told(error);
  memory_.Adopt(memory, bytes);
  return CallStatus{};
}

CallStatus FakeRuntime::OpenMemory(int device, const uint8_t* handle, void** memory, uint64_t* bytes) {
  if (const int error = CalledOn(device, "OpenMemory")) return Told(error);
  *memory = memory_.Open(handle, "fakemem", device, bytes);
  return Told(*memory == nullptr ? gpu::kInvalidHandle : 0);
}

CallStatus FakeRuntime::OpenEvent(int device, const uint8_t* handle, gpu::Event* event) {
  if (const int error = CalledOn(device, "OpenEvent")) return Told(error);
  uint64_t bytes = 0;
  *event = reinterpret_cast<gpu::Event>(memory_.Open(handle, "fakeevt", device, &bytes));
  return Told(*event == nullptr ? gpu::kInvalidHandle : 0);
}

CallStatus FakeRuntime::CreateStream(int device, DeviceStream* stream) {
  if (const int error = CalledOn(device, "CreateStream")) return Told(error);
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<FakeStream>());
  streams_.back()->device = device;
  *stream = DeviceStream{device, reinterpret_cast<gpu::Stream>(streams_.back().get())};
  return CallStatus{};
}

CallStatus FakeRuntime::DestroyStream(DeviceStream stream) {
  if (const int error = Called("DestroyStream")) return Told(error);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!StreamOf(stream)->queue.empty()) violations_.push_back("DestroyStream of a stream that has work");
  const auto is_it = [&](const auto& one) { return one.get() == StreamOf(stream); };
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), is_it), streams_.end());
  return CallStatus{};
}

CallStatus FakeRuntime::Synchronize(DeviceStream stream) {
  const int error = Called("Synchronize");
  std::unique_lock<std::mutex> lock(mutex_);
  FakeStream* const mine = StreamOf(stream);
  ++waiting_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return mine->queue.empty() && !mine->running; });
  --waiting_;
  const int late = std::exchange(mine->error, 0);
  return Told(error != 0 ? error : late != 0 ? late : sticky_);
}

CallStatus FakeRuntime::Queue(const std::string& call, DeviceStream stream,
                              std::vector<std::pair<const void*, uint64_t>> uses, std::function<void()> run) {
  int late = 0;
  if (const int error = Called(call, &late)) return Told(error);
  Op op{call, std::move(run), {}, late};
  for (const auto& [address, bytes] : uses) {
    const auto found = memory_.Find(address, bytes);
    if (!found.has_value()) {
      Violate(call + " of memory that is neither the device's nor pinned");
      return Told(gpu::kInvalidValue);
    }
    op.uses.push_back(*found);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  StreamOf(stream)->queue.push_back(std::move(op));
  changed_.notify_all();
  return CallStatus{};
}

CallStatus FakeRuntime::Query(int device, gpu::Event event) {
  if (const int error = CalledOn(device, "Query")) return Told(error);
  return Told(__atomic_load_n(reinterpret_cast<const uint32_t*>(event), __ATOMIC_ACQUIRE) != 0 ? 0 : gpu::kNotReady);
}

CallStatus FakeRuntime::Copy(void* to, const void* from, uint64_t bytes, DeviceStream stream) {
  return Queue("Copy", stream, {{to, bytes}, {from, bytes}}, [=] { std::memcpy(to, from, bytes); });
}

CallStatus FakeRuntime::CopyRows(gpu::Pitched to, gpu::Pitched from, size_t width_bytes, size_t rows,
                                 DeviceStream stream) {
  if (to.pitch_bytes < width_bytes || from.pitch_bytes < width_bytes) return Told(gpu::kInvalidValue);
  const auto span = [&](const gpu::Pitched& side) { return (rows - 1) * side.pitch_bytes + width_bytes; };
  return Queue("CopyRows", stream, {{to.data, span(to)}, {from.data, span(from)}}, [=] {
    for (size_t i = 0; i < rows; ++i) {
      std::memcpy(to.data + i * to.pitch_bytes, from.data + i * from.pitch_bytes, width_bytes);
    }
  });
}

CallStatus FakeRuntime::Zero(void* memory, uint64_t bytes, DeviceStream stream) {
  return Queue("Zero", stream, {{memory, bytes}}, [=] { std::memset(memory, 0, bytes); });
}

CallStatus FakeRuntime::ZeroRows(gpu::Pitched memory, size_t width_bytes, size_t rows, DeviceStream stream) {
  if (memory.pitch_bytes < width_bytes) return Told(gpu::kInvalidValue);
  return Queue("ZeroRows", stream, {{memory.data, (rows - 1) * memory.pitch_bytes + width_bytes}}, [=] {
    for (size_t i = 0; i < rows; ++i) std::memset(memory.data + i * memory.pitch_bytes, 0, width_bytes);
  });
}

LaunchStatus FakeRuntime::Launch(const std::string& call, DeviceStream stream, const char* wrong,
                                 std::vector<const void*> uses, std::function<void()> run) {
  if (wrong != nullptr) return LaunchStatus{wrong, 0};
  std::vector<std::pair<const void*, uint64_t>> ranges;
  for (const void* address : uses) {
    if (address != nullptr) ranges.push_back({address, 1});
  }
  const CallStatus queued = Queue(call, stream, std::move(ranges), std::move(run));
  return queued.ok() ? LaunchStatus{} : LaunchStatus{queued.name, queued.error};
}

LaunchStatus FakeRuntime::EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                      DeviceStream stream) {
  std::vector<gpu::EncodeJob> all(jobs, jobs + count);
  std::vector<const void*> uses = {workspace};
  for (const gpu::EncodeJob& job : all) {
    for (const void* use : std::initializer_list<const void*>{job.k.base, job.k.runs, job.v.base, job.v.runs, job.tiers, job.chunk,
                                                              job.report}) {
      uses.push_back(use);
    }
  }
  const char* const wrong = CheckJobs(all, workspace, workspace_bytes);
  return Launch("Encode", stream, wrong, std::move(uses),
                [this, all = std::move(all), workspace] { RunOnShim(all, workspace, memory_.Ranges()); });
}

LaunchStatus FakeRuntime::DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                      DeviceStream stream) {
  std::vector<gpu::DecodeJob> all(jobs, jobs + count);
  std::vector<const void*> uses = {workspace};
  for (const gpu::DecodeJob& job : all) {
    for (const void* use : std::initializer_list<const void*>{job.k.base, job.k.runs, job.v.base, job.v.runs, job.chunk,
                                                              job.report}) {
      uses.push_back(use);
    }
  }
  const char* const wrong = CheckJobs(all, workspace, workspace_bytes);
  return Launch("Decode", stream, wrong, std::move(uses),
                [this, all = std::move(all), workspace] { RunOnShim(all, workspace, memory_.Ranges()); });
}

LaunchStatus FakeRuntime::ScanBatch(const gpu::ScanJob* jobs, uint32_t count, DeviceStream stream) {
  std::vector<gpu::ScanJob> all(jobs, jobs + count);
  std::vector<const void*> uses;
  for (const gpu::ScanJob& job : all) uses.insert(uses.end(), {job.plane.base, job.plane.runs, job.scans});
  const char* const wrong = CheckJobs(all);
  return Launch("Scan", stream, wrong, std::move(uses), [this, all = std::move(all)] { RunOnShim(all, memory_.Ranges()); });
}

LaunchStatus FakeRuntime::SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count, DeviceStream stream) {
  std::vector<gpu::SpreadJob> all(jobs, jobs + count);
  std::vector<const void*> uses;
  for (const gpu::SpreadJob& job : all) uses.insert(uses.end(), {job.plane.base, job.plane.runs, job.spreads});
  const char* const wrong = CheckJobs(all);
  return Launch("Spread", stream, wrong, std::move(uses),
                [this, all = std::move(all)] { RunOnShim(all, memory_.Ranges()); });
}

LaunchStatus FakeRuntime::Attend(const gpu::AttendJob& job, void* workspace, size_t workspace_bytes,
                                 DeviceStream stream) {
  return Launch("Attend", stream, CheckJob(job, workspace, workspace_bytes),
                {job.k.base, job.k.runs, job.values, job.positions, job.scores, workspace},
                [this, job, workspace] { RunOnShim(job, workspace, memory_.Ranges()); });
}

LaunchStatus FakeRuntime::ZeroTokens(const gpu::ZeroJob& job, DeviceStream stream) {
  return Launch("ZeroTokens", stream, CheckJob(job), {job.plane.base, job.plane.runs},
                [this, job] { RunOnShim(job, memory_.Ranges()); });
}

FakeRuntime::FakeStream* FakeRuntime::Pick() {
  std::vector<FakeStream*> ready;
  for (const auto& stream : streams_) {
    if (!stream->queue.empty()) ready.push_back(stream.get());
  }
  if (ready.empty()) return nullptr;
  FakeStream* picked = ready[rng_() % ready.size()];
  if (last_ != nullptr && last_ != picked && std::find(ready.begin(), ready.end(), last_) != ready.end()) ++turns_;
  last_ = picked;
  return picked;
}

// The device: one operation after another, of any stream that has one, while somebody waits.
void FakeRuntime::Run() {
  sigset_t all;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    FakeStream* const stream = waiting_ > 0 ? Pick() : nullptr;
    if (stream == nullptr) {
      changed_.wait(lock);
      continue;
    }
    Op& op = stream->queue.front();  // stays in the queue while it runs: its memory is in use
    stream->running = true;
    // Behind a failure nothing of the stream runs until it has been told.
    int error = sticky_ != 0 ? sticky_ : stream->error != 0 ? stream->error : op.error;
    std::string fault;
    lock.unlock();
    if (error == 0) {
      const FakeMemory::Unlocked unlocked(&memory_);
      try {
        op.run();
      } catch (const shim::Fault& caught) {
        fault = caught.what();
        error = gpu::kIllegalAddress;
      }
    }
    lock.lock();
    if (!fault.empty()) violations_.push_back(op.name + ": " + fault);
    if (stream->error == 0) stream->error = error;
    if (gpu::IsSticky(error)) sticky_ = error;
    stream->running = false;
    stream->queue.pop_front();
    changed_.notify_all();
  }
}

}  // namespace spectrumkv::testing

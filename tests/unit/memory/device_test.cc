// GPUs, their memory, lanes and events, on a device that is not there (tests/cuda/fake); and that this device finds out
// what it is for: whoever does not wait, frees too early or copies from the wrong memory.
#include "server/memory/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "server/base/status.h"
#include "server/memory/device_events.h"
#include "server/memory/lane_memory.h"
#include "tests/cuda/fake/fake_runtime.h"

namespace spectrumkv {
namespace {

using testing::FakeExport;
using testing::FakeMemory;
using testing::FakeOptions;
using testing::FakeRuntime;

class DeviceTest : public ::testing::Test {
 protected:
  void TearDown() override {
    devices_.reset();
    EXPECT_EQ(runtime_.memory().live(FakeMemory::Kind::kDevice), 0u);
    EXPECT_EQ(runtime_.memory().live(FakeMemory::Kind::kPinned), 0u);
    if (!violates_) {
      EXPECT_TRUE(runtime_.violations().empty()) << runtime_.violations().front();
    }
  }
  Device& device(int index = 0) { return *devices_->all()[static_cast<size_t>(index)]; }

  bool violates_ = false;
  FakeRuntime runtime_{FakeOptions{2, 1}};
  std::unique_ptr<Devices> devices_ = Devices::Find(&runtime_, {});
};

TEST_F(DeviceTest, DevicesAreFoundByUuidInAnySpelling) {
  ASSERT_EQ(devices_->all().size(), 2u);
  EXPECT_TRUE(devices_->why_none().ok());
  for (std::string uuid : {FakeRuntime::Uuid(1), FakeRuntime::Uuid(1).substr(4), "MIG-" + FakeRuntime::Uuid(1).substr(4)}) {
    const auto found = devices_->Get(uuid);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, &device(1));
  }
  const absl::Status unknown = devices_->Get("GPU-1").status();
  EXPECT_EQ(ReasonOf(unknown), "UNKNOWN_DEVICE");
  EXPECT_NE(std::string(unknown.message()).find(FakeRuntime::Uuid(0)), std::string::npos) << "names those there are";
  EXPECT_NE(std::string(devices_->Get("MIG-1").status().message()).find("MIG instance"), std::string::npos);
}

TEST_F(DeviceTest, WithoutADeviceEveryCauseHasItsName) {
  const std::map<int, std::string> causes = {
      {gpu::kWithoutCuda, "CUDA_NOT_AVAILABLE"}, {gpu::kInsufficientDriver, "NO_DRIVER"},
      {gpu::kNoDevice, "NO_DEVICE"},             {gpu::kDriverMismatch, "DRIVER_TOO_OLD"},
      {gpu::kDriverTooOld, "DRIVER_TOO_OLD"},    {gpu::kDevicesUnavailable, "DEVICE_BUSY"},
      {gpu::kSystemNotReady, "DEVICE_BUSY"},
      {gpu::kUnknownError, "DEVICE_ERROR"}};
  for (const auto& [error, reason] : causes) {
    runtime_.Fail("CountDevices", error);
    const auto none = Devices::Find(&runtime_, {});
    EXPECT_TRUE(none->all().empty());
    EXPECT_EQ(ReasonOf(none->why_none()), reason) << error;
    EXPECT_EQ(ReasonOf(none->Get(FakeRuntime::Uuid(0)).status()), reason);
  }
  runtime_.Fail("Describe", gpu::kInvalidDevice);
  EXPECT_EQ(Devices::Find(&runtime_, {})->all().size(), 1u) << "one that cannot be used does not hide the others";
}

TEST_F(DeviceTest, OwnedMemoryIsZeroedAndCounted) {
  auto memory = device().Allocate(3 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(device().use().owned_bytes, uint64_t{3} << 20);
  auto lane = device().TakeLane();
  ASSERT_TRUE(lane.ok());
  uint8_t* const host = lane->Pinned(3 << 20);
  lane->Copy(host, (*memory)->data(), 3 << 20);
  ASSERT_TRUE(lane->Finish().ok());
  EXPECT_TRUE(std::all_of(host, host + (3 << 20), [](uint8_t byte) { return byte == 0; }));
  memory->reset();
  EXPECT_EQ(device().use().owned_bytes, 0u);
  EXPECT_EQ(ReasonOf(device().Allocate(uint64_t{1} << 40).status()), "OUT_OF_DEVICE_MEMORY");
}

// Whichever call is the first that works on a device makes its context, once, and no call makes another's.
TEST_F(DeviceTest, AContextIsMadeOnFirstUseAndItsCostIsKnown) {
  constexpr uint64_t kCost = uint64_t{300} << 20;
  FakeExport memory = FakeExport::Memory(1, 4096), event = FakeExport::Event(1);
  std::vector<uint8_t> staging(8192);
  const std::vector<std::function<absl::Status(Device&)>> first_uses = {
      [](Device& d) { return d.Allocate(4096).status(); }, [](Device& d) { return d.TakeLane().status(); },
      [&](Device& d) { return d.Import(memory.handle(), 0, 4096).status(); },
      [&](Device& d) { return DeviceEvents(&d).Add(event.handle()); }};
  for (const auto& use_first : first_uses) {
    FakeRuntime runtime(FakeOptions{2, 1});
    {
      const auto devices = Devices::Find(&runtime, {});
      devices->PinWhenUsed(staging.data(), staging.size());
      Device& used = *devices->all()[1];
      EXPECT_EQ(used.use().context_bytes, 0u);
      EXPECT_TRUE(runtime.contexts().empty());
      runtime.Fail("MakeContext", gpu::kOutOfMemory);
      EXPECT_EQ(ReasonOf(use_first(used)), "OUT_OF_DEVICE_MEMORY");
      EXPECT_EQ(used.use().context_bytes, 0u);
      EXPECT_TRUE(use_first(used).ok()) << "the next call tries again";
      EXPECT_EQ(used.use().context_bytes, kCost);
      for (const auto& use : first_uses) EXPECT_TRUE(use(used).ok());
      EXPECT_EQ(used.use().context_bytes, kCost);
      EXPECT_EQ(devices->all()[0]->use().context_bytes, 0u);
    }
    EXPECT_EQ(runtime.calls()["MakeContext"], 2);
    EXPECT_EQ(runtime.contexts(), std::set<int>{1}) << "closing all of it made none either";
    EXPECT_TRUE(runtime.violations().empty()) << runtime.violations().front();
  }
}

TEST_F(DeviceTest, AContextWhoseCostNobodyTellsIsNotFree) {
  FakeOptions options;
  options.context_bytes.reset();
  FakeRuntime runtime(options);
  const auto devices = Devices::Find(&runtime, {});
  EXPECT_EQ(devices->all()[0]->use().context_bytes, 0u);
  ASSERT_TRUE(devices->all()[0]->TakeLane().ok());
  EXPECT_EQ(devices->all()[0]->use().context_bytes, std::nullopt);
}

TEST_F(DeviceTest, AnAllocationIsOpenedOnceAndClosedWithItsLastPart) {
  FakeExport worker = FakeExport::Memory(0, 8192);
  auto first = device().Import(worker.handle(), 0, 4096);
  auto second = device().Import(worker.handle(), 4096, 4096);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_EQ((*second)->data(), (*first)->data() + 4096);
  EXPECT_EQ(runtime_.calls()["OpenMemory"], 1);
  EXPECT_EQ(ReasonOf(device().Import(worker.handle(), 4096, 4097).status()), "SEGMENT_TOO_SHORT");
  EXPECT_EQ(ReasonOf(device().Import(worker.handle(), UINT64_MAX, 2).status()), "SEGMENT_TOO_SHORT");
  EXPECT_EQ(ReasonOf(device().Import(worker.handle().substr(1), 0, 1).status()), "INVALID_IPC_HANDLE");
  first->reset();
  EXPECT_EQ(runtime_.calls()["CloseMemory"], 0);
  second->reset();
  EXPECT_EQ(runtime_.calls()["CloseMemory"], 1);
  EXPECT_EQ(ReasonOf(device().Import(worker.handle(), 0, 8193).status()), "SEGMENT_TOO_SHORT");
  EXPECT_EQ(runtime_.calls()["CloseMemory"], 2) << "a part that does not fit leaves nothing open";
  worker.Die();
  EXPECT_EQ(ReasonOf(device().Import(worker.handle(), 0, 8192).status()), "IPC_HANDLE_REFUSED");
  EXPECT_EQ(device().use().imports, 0u);
}

TEST_F(DeviceTest, AHandleThatCannotBeOpenedNamesTheCauses) {
  FakeExport worker = FakeExport::Memory(0, 4096);
  for (int error : {gpu::kInvalidValue, gpu::kInvalidDevice, gpu::kContextUninitialized, gpu::kMapFailed,
                    gpu::kInvalidHandle, gpu::kNotPermitted, gpu::kNotSupported, gpu::kTooManyPeers}) {
    runtime_.Fail("OpenMemory", error);
    const absl::Status refused = device().Import(worker.handle(), 0, 4096).status();
    EXPECT_EQ(ReasonOf(refused), "IPC_HANDLE_REFUSED") << error;
    for (const char* cause : {"still lives", "this device", "MIG", "PID", "IPC namespace"}) {
      EXPECT_NE(std::string(refused.message()).find(cause), std::string::npos) << cause;
    }
  }
  runtime_.Fail("OpenMemory", gpu::kOutOfMemory);
  EXPECT_EQ(ReasonOf(device().Import(worker.handle(), 0, 4096).status()), "OUT_OF_DEVICE_MEMORY");
  EXPECT_TRUE(device().Import(worker.handle(), 0, 4096).ok());
}

TEST_F(DeviceTest, AfterAnErrorThatEndsItNothingIsAskedOfTheDevice) {
  EXPECT_TRUE(device().Health().ok());
  {
    auto lane = device().TakeLane();
    ASSERT_TRUE(lane.ok());
    uint8_t* const host = lane->Pinned(64);
    uint8_t* const on_device = lane->OnDevice(64);
    runtime_.Fail("Copy", gpu::kIllegalAddress, 0, /*late=*/true);
    lane->Copy(on_device, host, 64);
    EXPECT_EQ(ReasonOf(lane->Finish()), "DEVICE_FAILED");
  }
  EXPECT_EQ(ReasonOf(device().Health()), "DEVICE_FAILED");
  EXPECT_EQ(ReasonOf(device().TakeLane().status()), "DEVICE_FAILED");
  EXPECT_EQ(ReasonOf(device().Allocate(1).status()), "DEVICE_FAILED");
  EXPECT_EQ(ReasonOf(device().Import(std::string(64, 'x'), 0, 1).status()), "DEVICE_FAILED");
  EXPECT_TRUE(device(1).Health().ok());
  runtime_.Revive();  // so that its memory can be freed
}

// Every code of runtime.h, when a call is made and when what it queued runs.
TEST_F(DeviceTest, EveryErrorOfTheRuntimeHasItsReason) {
  const std::string failed = "DEVICE_FAILED", other = "DEVICE_ERROR";
  const std::map<int, std::string> reasons = {
      {gpu::kInvalidValue, other},         {gpu::kOutOfMemory, "OUT_OF_DEVICE_MEMORY"}, {gpu::kInitializationError, other},
      {gpu::kInsufficientDriver, "NO_DRIVER"}, {gpu::kDevicesUnavailable, "DEVICE_BUSY"}, {gpu::kNoDevice, "NO_DEVICE"},
      {gpu::kInvalidDevice, other},        {gpu::kContextUninitialized, other},         {gpu::kMapFailed, other},
      {gpu::kNoKernelImage, "DEVICE_TOO_OLD"}, {gpu::kEccUncorrectable, failed},        {gpu::kInvalidHandle, other},
      {gpu::kNotReady, other},             {gpu::kIllegalAddress, failed},              {gpu::kLaunchTimeout, failed},
      {gpu::kTooManyPeers, other},         {gpu::kHardwareStack, failed},               {gpu::kIllegalInstruction, failed},
      {gpu::kMisalignedAddress, failed},   {gpu::kLaunchFailure, failed},               {gpu::kNotPermitted, other},
      {gpu::kNotSupported, other},         {gpu::kSystemNotReady, "DEVICE_BUSY"},       {gpu::kDriverMismatch, "DRIVER_TOO_OLD"},
      {gpu::kUnknownError, other},         {gpu::kWithoutCuda, "CUDA_NOT_AVAILABLE"},   {gpu::kDriverTooOld, "DRIVER_TOO_OLD"},
      {220, failed}, {226, failed}, {710, failed}, {717, failed}, {718, failed}, {721, failed}, {810, failed}, {911, failed},
      {1, other},    {304, other},  {701, other},  {999, other}};
  for (const auto& [error, reason] : reasons) {
    for (const bool late : {false, true}) {
      devices_ = Devices::Find(&runtime_, {});
      {
        auto lane = device().TakeLane();
        ASSERT_TRUE(lane.ok()) << lane.status();
        uint8_t* const host = lane->Pinned(64);
        uint8_t* const on_device = lane->OnDevice(64);
        runtime_.Fail("Copy", error, 0, late);
        lane->Copy(on_device, host, 64);
        EXPECT_EQ(ReasonOf(lane->Finish()), reason) << error << (late ? " late" : "");
        EXPECT_EQ(ReasonOf(device().Health()), reason == failed ? failed : "") << error;
      }
      runtime_.Revive();
    }
  }
}

TEST_F(DeviceTest, EventsAreAskedAndClosedWhenReached) {
  FakeExport first = FakeExport::Event(0), second = FakeExport::Event(0);
  DeviceEvents events(&device());
  ASSERT_TRUE(events.Reached().ok());
  EXPECT_TRUE(*events.Reached());
  ASSERT_TRUE(events.Add(first.handle()).ok());
  ASSERT_TRUE(events.Add(second.handle()).ok());
  EXPECT_FALSE(*events.Reached());
  second.Reach();
  EXPECT_FALSE(*events.Reached());
  first.Reach();
  EXPECT_TRUE(*events.Reached());
  EXPECT_EQ(runtime_.calls()["DestroyEvent"], 2);
  EXPECT_EQ(ReasonOf(events.Add("short")), "INVALID_IPC_HANDLE");
  EXPECT_EQ(ReasonOf(events.Add(std::string(64, 'x'))), "IPC_HANDLE_REFUSED");
}

TEST_F(DeviceTest, ThereAreAsManyLanesAsAllowedAndTheyAreUsedAgain) {
  Devices::Options options;
  options.lanes_per_device = 2;
  const auto devices = Devices::Find(&runtime_, options);
  Device& one = *devices->all()[0];
  for (int i = 0; i < 5; ++i) {
    auto a = one.TakeLane();
    auto b = one.TakeLane();
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(one.use().lanes, 2u);
  }
  runtime_.Fail("CreateStream", gpu::kOutOfMemory);
  EXPECT_EQ(ReasonOf(devices->all()[1]->TakeLane().status()), "OUT_OF_DEVICE_MEMORY");
  EXPECT_TRUE(devices->all()[1]->TakeLane().ok());
}

TEST_F(DeviceTest, ALaneThatCannotBeMadeIsWaitedForWhereOthersHaveSome) {
  auto held = device().TakeLane();
  ASSERT_TRUE(held.ok());
  runtime_.Fail("CreateStream", gpu::kOutOfMemory);
  std::atomic<bool> taken{false};
  std::thread waits([&] {
    EXPECT_TRUE(device().TakeLane().ok());
    taken = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(taken);
  held = absl::CancelledError("given back");
  waits.join();
}

TEST_F(DeviceTest, AGpuThatFailsLeavesNobodyWaitingForALane) {
  Devices::Options options;
  options.lanes_per_device = 1;
  const auto devices = Devices::Find(&runtime_, options);
  Device& one = *devices->all()[0];
  auto held = one.TakeLane();
  ASSERT_TRUE(held.ok());
  LaneMemory memory;
  const auto part = memory.Take(64);
  ASSERT_TRUE(memory.Map(&*held));
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&] { EXPECT_EQ(ReasonOf(one.TakeLane().status()), "DEVICE_FAILED"); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  runtime_.Fail("Copy", gpu::kIllegalAddress);
  held->Copy(memory.host(part), memory.device(part), 64);
  EXPECT_FALSE(held->Finish().ok());
  held = absl::CancelledError("given back");
  for (std::thread& thread : waiting) thread.join();
  runtime_.Revive();
}

TEST_F(DeviceTest, StagingThatCannotBePinnedIsCopiedOnceMoreOrRefused) {
  std::vector<uint8_t> staging(8192);
  for (const bool allowed : {true, false}) {
    Devices::Options options;
    options.allow_unpinned = allowed;
    const auto devices = Devices::Find(&runtime_, options);
    devices->PinWhenUsed(staging.data(), staging.size());
    runtime_.Fail("Pin", gpu::kOutOfMemory);
    for (int i = 0; i < 2; ++i) {
      auto lane = devices->all()[0]->TakeLane();
      EXPECT_EQ(lane.ok(), allowed);
      if (allowed) {
        EXPECT_FALSE(lane->IsPinned(staging.data()));
      }
      if (!allowed) {
        EXPECT_EQ(ReasonOf(lane.status()), "HOST_FALLBACK_FORBIDDEN");
        EXPECT_EQ(ReasonOf(devices->all()[0]->Allocate(64).status()), "HOST_FALLBACK_FORBIDDEN");
      }
      FakeExport worker = FakeExport::Memory(0, 4096);
      EXPECT_EQ(ReasonOf(devices->all()[0]->Import(worker.handle(), 0, 4096).status()),
                allowed ? "" : "HOST_FALLBACK_FORBIDDEN");
    }
  }
  const auto devices = Devices::Find(&runtime_, {});
  devices->PinWhenUsed(staging.data(), staging.size());
  auto lane = devices->all()[0]->TakeLane();
  ASSERT_TRUE(lane.ok());
  EXPECT_TRUE(lane->IsPinned(staging.data() + 8191));
  EXPECT_FALSE(lane->IsPinned(staging.data() + 8192));
}

// What the fake device is for.
TEST_F(DeviceTest, TheFakeDeviceRunsNothingBeforeSomebodyWaits) {
  auto lane = device().TakeLane();
  ASSERT_TRUE(lane.ok());
  LaneMemory memory;
  const auto part = memory.Take(64);
  ASSERT_TRUE(memory.Map(&*lane));
  std::memset(memory.host(part), 1, 64);
  memory.Upload(part, part);
  lane->Copy(memory.host(part), memory.device(part), 64);
  std::memset(memory.host(part), 2, 64);  // too early: the copy has not run
  ASSERT_TRUE(lane->Finish().ok());
  EXPECT_EQ(memory.host(part)[0], 2) << "the device copied what was there when it ran";
}

TEST_F(DeviceTest, TheFakeDeviceFindsOutWhoMakesAContextUnasked) {
  violates_ = true;
  void* pinned = nullptr;
  ASSERT_TRUE(runtime_.AllocatePinned(1, 64, &pinned).ok());
  ASSERT_EQ(runtime_.violations().size(), 1u);
  EXPECT_EQ(runtime_.violations()[0], "AllocatePinned makes a context on device 1");
  ASSERT_TRUE(runtime_.FreePinned(1, pinned).ok());
}

TEST_F(DeviceTest, TheFakeDeviceFindsOutWhoFreesWhatIsInUse) {
  violates_ = true;
  auto memory = device().Allocate(4096);
  ASSERT_TRUE(memory.ok());
  auto lane = device().TakeLane();
  ASSERT_TRUE(lane.ok());
  lane->Copy(lane->Pinned(64), (*memory)->data(), 64);
  EXPECT_TRUE(runtime_.violations().empty());
  uint8_t pageable[64] = {};
  lane->Copy(pageable, (*memory)->data(), 64);
  ASSERT_EQ(runtime_.violations().size(), 1u);
  EXPECT_NE(runtime_.violations()[0].find("neither the device's nor pinned"), std::string::npos);
  EXPECT_EQ(ReasonOf(lane->Finish()), "DEVICE_ERROR");
  gpu::DeviceStream stream;
  ASSERT_TRUE(runtime_.CreateStream(0, &stream).ok());
  ASSERT_TRUE(runtime_.Zero((*memory)->data(), 64, stream).ok());
  memory->reset();
  ASSERT_EQ(runtime_.violations().size(), 2u);
  EXPECT_NE(runtime_.violations()[1].find("queued Zero"), std::string::npos);
  runtime_.DropQueues();
  ASSERT_TRUE(runtime_.DestroyStream(stream).ok());
}

TEST(DeviceMemoryDeathTest, TheHostCannotReadDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        FakeMemory memory;
        volatile uint8_t* const at = memory.Allocate(FakeMemory::Kind::kDevice, 64);
        static_cast<void>(*at);
      },
      "");
}

}  // namespace
}  // namespace spectrumkv

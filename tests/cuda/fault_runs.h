// Runs a kernel of faults.cuh on a Launcher and tells how it ended. Include faults.cuh first.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/cuda/shim/block.h"

namespace spectrumkv::testing {

struct FaultRun {
  std::vector<uint8_t> memory;
  std::string fault;  // "" where it ran to its end
};

// make_launcher(options) gives a Launcher; Fault is what it throws.
template <typename Fault, typename MakeLauncher>
FaultRun RunFault(void (*kernel)(const gpu::FaultArgs), shim::Order order, const MakeLauncher& make_launcher,
                  uint8_t first = 0) {
  constexpr size_t kBytes = 64 + 4 * gpu::kFaultThreads;
  alignas(16) static uint8_t memory[kBytes];
  for (size_t i = 0; i < kBytes; ++i) memory[i] = static_cast<uint8_t>(first + i * 7);
  FaultRun run;
  try {
    auto launch = make_launcher(shim::Options{order, 3, {{memory, kBytes}}});
    launch(kernel, 1, gpu::kFaultThreads, gpu::FaultArgs{memory, kBytes});
  } catch (const Fault& fault) {
    run.fault = fault.what();
  }
  run.memory.assign(memory, memory + kBytes);
  return run;
}

constexpr shim::Order kOrders[] = {shim::Order::kForward, shim::Order::kReverse, shim::Order::kRandom};

// The right form runs to its end in every order, with one result; the faulty form is refused in these words.
template <typename Fault, typename MakeLauncher>
void ExpectRefused(void (*right)(const gpu::FaultArgs), void (*faulty)(const gpu::FaultArgs), const std::string& words,
                   const MakeLauncher& make_launcher) {
  const FaultRun first = RunFault<Fault>(right, shim::Order::kForward, make_launcher);
  for (shim::Order order : kOrders) {
    const FaultRun good = RunFault<Fault>(right, order, make_launcher);
    EXPECT_EQ(good.fault, "");
    EXPECT_TRUE(good.memory == first.memory);
    const FaultRun bad = RunFault<Fault>(faulty, order, make_launcher);
    EXPECT_NE(bad.fault.find(words), std::string::npos) << "'" << bad.fault << "' does not say " << words;
  }
}

// A missing barrier shows as a result that depends on the order. Each run has other values, so that what an earlier one
// left in shared memory is never right.
template <typename Fault, typename MakeLauncher>
void ExpectOrderShows(const MakeLauncher& make_launcher) {
  int wrong = 0;
  for (uint8_t first = 0; first < 3; ++first) {
    std::vector<uint8_t> expected(gpu::kFaultThreads);
    for (size_t t = 0; t < expected.size(); ++t) {
      expected[t] = static_cast<uint8_t>(first * 2 + (expected.size() - 1 - t) * 7 + 1);
    }
    const auto equals = [&](void (*kernel)(const gpu::FaultArgs), uint8_t values) {
      const FaultRun run = RunFault<Fault>(kernel, kOrders[first], make_launcher, values);
      return std::equal(expected.begin(), expected.end(), run.memory.begin());
    };
    EXPECT_TRUE(equals(gpu::MissingBarrier<false>, static_cast<uint8_t>(first * 2)));
    // Leaves other values in the shared memory of the faulty form too.
    RunFault<Fault>(gpu::MissingBarrier<true>, kOrders[first], make_launcher, static_cast<uint8_t>(first * 2 + 1));
    wrong += equals(gpu::MissingBarrier<true>, static_cast<uint8_t>(first * 2)) ? 0 : 1;
  }
  EXPECT_EQ(wrong, 3);
}

}  // namespace spectrumkv::testing

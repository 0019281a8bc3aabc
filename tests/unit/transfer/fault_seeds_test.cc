// All seams at once, in many short lives, and one engine pair in long random walks; see simulation/simulation.h.
//
//   SPECTRUMKV_FAULT_SEED=N    only the simulation of this seed: what a failure prints
//   SPECTRUMKV_FAULT_POINTS    how many seeds (300)
//   SPECTRUMKV_ENGINE_EVENTS   how many events the walks have; unset: as many as fit into 20 s
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "gtest/gtest-spi.h"
#include "tests/unit/memory/failing_memory.h"
#include "tests/unit/transfer/simulation/simulation.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kShort = 500, kLong = 4000;  // events of one simulation

uint64_t NumberFrom(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

// True: nothing was broken.
bool Live(uint64_t seed, uint64_t events, SimCounts* counts) {
  const int files = OpenFiles();
  {
    auto simulation = std::make_unique<Simulation>(seed, counts);
    const int64_t mappings = LiveMappings();  // the slots have theirs now
    simulation->Run(events);
    if (!testing::Test::HasFailure()) simulation->Finish();
    if (!testing::Test::HasFailure()) {
      EXPECT_EQ(LiveMappings(), mappings) << "a mapping is left";
    }
    // Where a promise was broken its engines may never come to rest: they are left alone.
    if (testing::Test::HasFailure()) (void)simulation.release();
  }
  if (!testing::Test::HasFailure()) {
    EXPECT_EQ(OpenFiles(), files) << "a file is left open";
  }
  if (!testing::Test::HasFailure()) return true;
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::printf("replay: SPECTRUMKV_FAULT_SEED=%llu transfer_fault_seeds_test --gtest_filter=%s.%s\n",
              static_cast<unsigned long long>(seed), test->test_suite_name(), test->name());
  std::fflush(stdout);
  return false;
}

void Print(const SimCounts& counts) {
  std::printf("%llu events, %llu steps of executors, %llu transfers, %llu restarts\n",
              static_cast<unsigned long long>(counts.events), static_cast<unsigned long long>(counts.steps),
              static_cast<unsigned long long>(counts.transfers), static_cast<unsigned long long>(counts.restarts));
  std::printf("ends of halves: %llu committed, %llu failed, %llu cancelled, %llu expired\n",
              static_cast<unsigned long long>(counts.ends[5]), static_cast<unsigned long long>(counts.ends[6]),
              static_cast<unsigned long long>(counts.ends[7]), static_cast<unsigned long long>(counts.ends[8]));
  std::printf("refinements:\n");
  for (const auto& [name, count] : counts.refined) {
    std::printf("  %8llu %s\n", static_cast<unsigned long long>(count), name.c_str());
  }
  std::printf("faults, and reasons of ends:\n");
  for (const auto* group : {&counts.faults, &counts.reasons}) {
    for (const auto& [name, count] : *group) {
      std::printf("  %8llu %s\n", static_cast<unsigned long long>(count), name.c_str());
    }
  }
}

// Every fault that a seam has, by the name it is counted by.
std::set<std::string> Promised() {
  std::set<std::string> all = {"clock: a jump",
                               "codec: a byte flipped",
                               "executor: slow reader, worker or codec",
                               "daemon: drains",
                               "memory: none for staging",
                               "memory: slots run out",
                               "network: a peer is cut off, or back",
                               "pool: its worker dies",
                               "pool: unregistered"};
  for (const char* message : {"chunk: ", "frame: "}) {
    for (const char* what : {"delay", "break", "reorder", "duplicate", "flip", "truncate", "drop"}) {
      all.insert(std::string(message) + what);
    }
  }
  for (const char* refused : {"memory: a mapping is refused", "memory: pages are refused"}) {
    for (const char* error : {", ENOSPC", ", ENOMEM"}) all.insert(std::string(refused) + error);
  }
  return all;
}

// What refinements must have come to, by the name it is counted by.
std::set<std::string> PromisedOfRefinements() {
  std::set<std::string> all = {"a block of a base went to others",
                               "apply: NOT_RETAINED",
                               "apply: REFINEMENT_DROPPED",
                               "asked again",
                               "cells applied",
                               "cells left alone, their blocks are others'",
                               "cells that a direct one wrote",
                               "decode wrote behind the last token",
                               "exact",
                               "refused: BLOCKS_REUSED",
                               "refused: NOT_RETAINED",
                               "refused: REFINE_STAGING_FULL",
                               "released"};
  for (const char* begun : {"begun", "begun in the background"}) {
    for (const char* mode : {", direct", ", staged"}) all.insert(std::string(begun) + mode);
  }
  for (const char* who : {"sender", "receiver"}) {
    for (const char* end : {" COMMITTED", " CANCELLED, CANCELLED", " EXPIRED, DEADLINE_EXCEEDED", " FAILED, RELEASED",
                            " FAILED, RETENTION_EXPIRED"}) {
      all.insert(std::string(who) + end);
    }
  }
  for (const char* why : {"NOT_RETAINED", "PEER_GONE", "SOURCE_GONE"}) {
    all.insert(std::string("receiver FAILED, ") + why);
  }
  return all;
}

TEST(FaultSeeds, EverySeamAtOnceBreaksNoPromise) {
  SimCounts counts;
  const uint64_t only = NumberFrom("SPECTRUMKV_FAULT_SEED", 0);
  const uint64_t points = only != 0 ? 1 : NumberFrom("SPECTRUMKV_FAULT_POINTS", 300);
  for (uint64_t i = 0; i < points; ++i) {
    if (!Live(only != 0 ? only : 1 + i, kShort, &counts)) break;
  }
  std::printf("%llu seeds: ", static_cast<unsigned long long>(points));
  Print(counts);
  if (points < 300) return;
  for (size_t state = 5; state <= 8; ++state) EXPECT_GT(counts.ends[state], points / 10) << "too tame to prove anything";
  for (const std::string& fault : Promised()) EXPECT_GT(counts.faults[fault], 0u) << fault << " was never tried";
  for (const std::string& what : PromisedOfRefinements()) EXPECT_GT(counts.refined[what], 0u) << what << " never was";
}

// Other seeds each time.
TEST(FaultSeeds, RandomWalksOfTheEngineKeepThePromises) {
  SimCounts counts;
  const uint64_t only = NumberFrom("SPECTRUMKV_FAULT_SEED", 0);
  const uint64_t wanted = NumberFrom("SPECTRUMKV_ENGINE_EVENTS", 0);
  uint64_t seed = only != 0 ? only : uint64_t{std::random_device()()} << 20;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    if (!Live(seed++, kLong, &counts)) break;
  } while (only == 0 && (wanted != 0 ? counts.events < wanted : std::chrono::steady_clock::now() < until));
  Print(counts);
}

// A failure can be looked at again.
TEST(FaultSeeds, ASeedAlwaysLivesTheSameLife) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SimCounts first, second;
    ASSERT_TRUE(Live(seed, kShort, &first));
    ASSERT_TRUE(Live(seed, kShort, &second));
    EXPECT_EQ(first.steps, second.steps) << seed;
    EXPECT_EQ(first.ends, second.ends) << seed;
    EXPECT_EQ(first.faults, second.faults) << seed;
    EXPECT_EQ(first.reasons, second.reasons) << seed;
    EXPECT_EQ(first.refined, second.refined) << seed;
  }
}

// True: in the life of this seed a check has failed with these words.
bool Sees(SimBug bug, const std::string& words, uint64_t seed) {
  testing::TestPartResultArray found;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    SimCounts counts;
    Simulation simulation(seed, &counts);
    simulation.Hurt(bug, [&found] { return found.size() > 0; });
    simulation.Run(kShort);
    simulation.Finish();
  }
  for (int i = 0; i < found.size(); ++i) {
    if (std::string(found.GetTestPartResult(i).message()).find(words) != std::string::npos) return true;
  }
  return false;
}

// Checks that cannot fail prove nothing.
TEST(FaultSeeds, EachCheckOfRefinementsSeesItsBug) {
  struct Seeded {
    SimBug bug;
    const char *name, *words;
  };
  const Seeded kBugs[] = {
      {SimBug::kFreshLies, "a ticket lies", "was written without leave"},
      {SimBug::kSourceChanges, "a kept source changes", "neither the base's nor the source's"},
      {SimBug::kReuseUntold, "a destination is used for other things", "applied to blocks that had been released"},
      {SimBug::kEndUntold, "an end is not told", "not told of its end"},
      {SimBug::kBaseFails, "a base fails", "a refinement has changed that"},
      {SimBug::kBytesMissing, "a byte is missing", "do not add up"},
      {SimBug::kNeverReleased, "staging stays", "staging of refinements is left"},
  };
  for (const Seeded& seeded : kBugs) {
    uint64_t seed = 1;
    while (seed <= 100 && !Sees(seeded.bug, seeded.words, seed)) ++seed;
    EXPECT_LE(seed, 100u) << seeded.name << " is not seen";
    std::printf("%s: seen in life %llu\n", seeded.name, static_cast<unsigned long long>(seed));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace spectrumkv

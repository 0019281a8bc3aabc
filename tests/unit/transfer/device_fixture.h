// Two engines with a fake device each, whose streams run late and in a seeded order, and whose kernels are the real ones on
// the shim.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/scan/attention.h"
#include "tests/cuda/fake/fake_runtime.h"
#include "tests/unit/metrics/exposition.h"
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
using testing::FakeMemory;
using testing::FakeOptions;
using testing::FakeRuntime;

enum class Where { kHost, kDevice };

class DeviceEngineTest : public EngineTest {
 protected:
  void Build(uint32_t seed = 1, uint64_t sampled = 1, size_t slots = 8) {
    runtime_a_ = std::make_unique<FakeRuntime>(FakeOptions{2, seed});
    runtime_b_ = std::make_unique<FakeRuntime>(FakeOptions{2, seed + 100});
    EngineSettings settings;
    settings.options.progress_timeout_ms = 5000;
    settings.options.inline_chunk_bytes = 0;
    settings.options.cache_bytes = 1 << 20;
    settings.reconstruction_chunks = sampled;
    settings.slots = slots;
    settings.runtime = runtime_a_.get();
    a_ = std::make_unique<Engine>("a", network_.get(), settings, kEpochA);
    settings.runtime = runtime_b_.get();
    b_ = std::make_unique<Engine>("b", network_.get(), settings, kEpochB);
  }
  void TearDown() override {
    EngineTest::TearDown();
    runtime_a_->Revive();
    runtime_b_->Revive();
    a_.reset();
    b_.reset();
    for (FakeRuntime* runtime : {runtime_a_.get(), runtime_b_.get()}) {
      EXPECT_TRUE(runtime->violations().empty()) << runtime->violations().front();
      EXPECT_EQ(runtime->memory().live(FakeMemory::Kind::kDevice), 0u) << "device memory leaked";
      EXPECT_EQ(runtime->memory().live(FakeMemory::Kind::kPinned), 0u) << "pinned memory leaked";
    }
  }

  void Prepare(Where source, Where target) {
    source_layout_.device = source == Where::kDevice ? FakeRuntime::Uuid(1) : "";
    target_layout_.device = target == Where::kDevice ? FakeRuntime::Uuid(0) : "";
    EngineTest::Prepare();
  }

  // One transfer of `tokens` to its end.
  TransferReport Run(const std::string& id, const Policy& policy, uint32_t tokens = 80) {
    auto target = Target(tokens);
    auto source = Source(tokens);
    if (source == nullptr || target == nullptr) return {};  // has failed the test
    ReceiverSpec receiver = Expect(id, std::move(target));
    receiver.accept_dropped = true;
    EXPECT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    SenderSpec spec = Send(id, std::move(source), policy);
    if (policy.importance == ImportanceSource::kRecentQueries) spec.queries = Queries({0, 2});
    EXPECT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    sent_report_ = a_->Watch(id, Role::kSender)->WaitTerminal(60);
    return b_->Watch(id, Role::kReceiver)->WaitTerminal(60);
  }

  static std::map<std::string, Policy> Policies() {
    std::map<std::string, Policy> policies;
    policies["raw"] = Raw();
    policies["greedy"].budget = 0.4;
    policies["key_norm"].budget = 0.3;
    policies["key_norm"].importance = ImportanceSource::kKeyNorm;
    policies["optimal"].budget = 0.4;
    policies["optimal"].allocator = Allocator::kOptimal;
    policies["optimal"].importance = ImportanceSource::kNone;
    policies["recent"].budget = 0.4;
    policies["recent"].importance = ImportanceSource::kRecentQueries;
    policies["recent_drop"] = policies["recent"];
    policies["recent_drop"].allocator = Allocator::kSlidingWindowSink;
    policies["recent_drop"].allow_drop = true;
    return policies;
  }

  // Of six query heads at positions 60, 70 and 76.
  std::shared_ptr<RecentQueries> Queries(const std::vector<uint32_t>& layers) const {
    constexpr uint32_t kHeads = 6;
    auto queries = std::make_shared<RecentQueries>();
    queries->dtype = DType::kFloat32;
    queries->positions = {60, 70, 76};
    std::mt19937 random(11);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (const uint32_t layer : layers) {
      std::vector<float> values(queries->positions.size() * kHeads * source_layout_.head_dim);
      for (float& value : values) value = normal(random);
      queries->layers.push_back(
          {layer, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4), kHeads, 0, 0, 0});
    }
    return queries;
  }
  // Reconstruction errors that the sender has told: (sum, count).
  std::pair<double, double> Reconstruction() const {
    std::pair<double, double> all;
    for (const auto& [name, value] : ParseExposition(a_->metrics().Render())) {
      if (name.rfind("spectrumkv_reconstruction_error_ratio_sum", 0) == 0) all.first += value;
      if (name.rfind("spectrumkv_reconstruction_error_ratio_count", 0) == 0) all.second += value;
    }
    return all;
  }

  TransferReport sent_report_;
  std::unique_ptr<FakeRuntime> runtime_a_, runtime_b_;
};

// Where the two pools of a transfer are.
struct Way {
  Where source, target;
};

}  // namespace spectrumkv

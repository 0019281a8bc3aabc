#include "client/ctl/policy_flags.h"

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstring>

#include "client/ctl/npy.h"

namespace spectrumkv::ctl {
namespace {

std::string Upper(std::string text) {
  for (char& c : text) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

void ReadScores(const std::string& path, Args* args, v1::Importance* importance) {
  const absl::StatusOr<std::string> file = ReadFile(path);
  const absl::StatusOr<Array> array = file.ok() ? ParseNpy(*file) : file.status();
  if (!array.ok()) {
    args->Refuse("--scores: " + std::string(array.status().message()));
  } else if (array->descr != "<f4" || array->shape.empty() || array->shape.size() > 2) {
    args->Refuse("--scores must be float32, [tokens] or [layers, tokens]");
  } else if (array->data.size() / sizeof(float) > INT_MAX) {  // no message holds more
    args->Refuse("--scores has more than " + std::to_string(INT_MAX) + " values");
  } else {
    importance->mutable_scores()->Resize(static_cast<int>(array->data.size() / sizeof(float)), 0);
    std::memcpy(importance->mutable_scores()->mutable_data(), array->data.data(), array->data.size());
    importance->set_scores_per_layer(array->shape.size() == 2);
  }
}

void ReadImportance(Args* args, v1::Policy* policy) {
  const std::string source = args->Text("importance");
  if (!source.empty()) {
    v1::ImportanceSource value = v1::IMPORTANCE_SOURCE_UNSPECIFIED;
    if (!v1::ImportanceSource_Parse("IMPORTANCE_SOURCE_" + Upper(source), &value)) {
      args->Refuse("--importance must be scores, position, key-norm or none, not \"" + source + "\"");
    }
    policy->mutable_importance()->set_source(value);
  }
  if (args->Has("scores")) ReadScores(args->Text("scores"), args, policy->mutable_importance());
  if (args->Has("decay")) policy->mutable_importance()->set_decay_lambda(args->Real("decay", 0));
  if (args->Has("sinks")) {
    policy->mutable_importance()->set_sinks(static_cast<uint32_t>(args->Number("sinks", 4, 0, UINT32_MAX)));
  }
}

void ReadBudget(Args* args, v1::Policy* policy) {
  const bool chosen = args->Text("budget") == "auto";
  if (chosen) {
    args->Needed("target-seconds");
    policy->mutable_auto_budget()->set_target_seconds(args->Real("target-seconds", 0));
    if (args->Has("min-budget")) policy->mutable_auto_budget()->set_min_budget(args->Real("min-budget", 0));
    return;
  }
  for (const char* flag : {"target-seconds", "min-budget"}) {
    if (args->Has(flag)) args->Refuse("--" + std::string(flag) + " is for --budget auto");
  }
  if (args->Has("budget")) policy->set_budget(args->Real("budget", 0));
}

}  // namespace

v1::Tier ReadTier(const std::string& text, Args* args) {
  v1::Tier tier = v1::TIER_UNSPECIFIED;
  if (!v1::Tier_Parse("TIER_" + Upper(text), &tier) || tier == v1::TIER_UNSPECIFIED) {
    args->Refuse("\"" + text + "\" is no tier; there are RAW, Q8, Q4, Q3, Q2, P8, P4 and DROP");
  }
  return tier;
}

std::vector<Flag> PolicyFlags() {
  return {{"budget", "SHARE",
           "of the raw KV bytes that may cross the wire, as 0.3; or auto, with --target-seconds; default the daemon's"},
          {"target-seconds", "SECONDS", "for --budget auto: the daemon takes the least lossy budget that is quick enough"},
          {"min-budget", "SHARE", "for --budget auto: the smallest it may take; default the daemon's"},
          {"allocator", "NAME",
           "optimal, greedy, sink-protect, balanced, two-tier, uniform, random, pdtrim, "
           "sliding-window-sink or raw"},
          {"tiers", "LIST", "tiers that may be used, as RAW,Q8,Q4"},
          {"uniform-tier", "TIER", "for --allocator uniform"},
          {"seed", "N", "for --allocator random"},
          {"importance", "SOURCE", "scores, position, key-norm or none"},
          {"scores", "FILE", "float32 .npy: [tokens] or [layers, tokens]"},
          {"decay", "LAMBDA", "importance decays by exp(-LAMBDA * distance from the end)"},
          {"sinks", "N", "tokens at the front that are never lossy; default 4, or 1 (OPTIMAL with scores)"},
          {"strict-budget", "", "fail rather than overrun the budget layer by layer"},
          {"payload-only", "", "the budget counts codes only"},
          {"retain", "SECONDS", "keep the source for so long after the commit, so that it can be refined"}};
}

v1::Policy ReadPolicy(Args* args) {
  v1::Policy policy;
  ReadBudget(args, &policy);
  const std::string allocator = args->Text("allocator");
  if (!allocator.empty()) {
    v1::Allocator value = v1::ALLOCATOR_UNSPECIFIED;
    if (!v1::Allocator_Parse("ALLOCATOR_" + Upper(allocator), &value)) {
      args->Refuse("\"" + allocator + "\" is no allocator");
    }
    policy.set_allocator(value);
  }
  for (const std::string& tier : args->List("tiers")) policy.add_tiers(ReadTier(tier, args));
  if (args->Has("uniform-tier")) policy.set_uniform_tier(ReadTier(args->Text("uniform-tier"), args));
  policy.set_random_seed(args->Number("seed", 0, 0, UINT64_MAX));
  ReadImportance(args, &policy);
  policy.set_strict_budget(args->Switch("strict-budget"));
  policy.set_payload_only(args->Switch("payload-only"));
  policy.set_retain_seconds(args->Real("retain", 0));
  return policy;
}

}  // namespace spectrumkv::ctl

#include "server/transfer/report.h"

namespace spectrumkv {

const char* StageName(Stage stage) {
  static const char* const kNames[kStageCount] = {"queue", "scan", "plan", "encode",
                                                  "send", "receive", "decode", "commit"};
  return kNames[static_cast<size_t>(stage)];
}

ByFamily TransferReport::KvBytesByFamily() const {
  ByFamily bytes{};
  double total = 0;
  for (int tier = 0; tier < kTierCount; ++tier) {
    const auto planes = static_cast<double>(tiers.k[static_cast<size_t>(tier)] + tiers.v[static_cast<size_t>(tier)]);
    bytes[static_cast<size_t>(FamilyOf(static_cast<Tier>(tier)))] += planes;
    total += planes;
  }
  if (total == 0 || tokens == 0) return ByFamily{};
  const double moved = static_cast<double>(kv_bytes) * kept_tokens / tokens;
  for (double& family : bytes) family *= moved / total;
  return bytes;
}

}  // namespace spectrumkv

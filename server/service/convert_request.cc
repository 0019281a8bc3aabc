#include <cmath>
#include <cstring>
#include <utility>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include "absl/hash/hash.h"
#include "server/base/host_rule.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/service/check.h"
#include "server/service/convert.h"

namespace spectrumkv {
namespace {

absl::StatusOr<int64_t> InRange(uint64_t value, int64_t fallback, int64_t least, int64_t most,
                                const std::string& field) {
  if (value == 0) return fallback;
  if (value >= static_cast<uint64_t>(least) && value <= static_cast<uint64_t>(most)) return static_cast<int64_t>(value);
  return Invalid("OUT_OF_RANGE", field,
                 "is " + std::to_string(value) + ", allowed are " + std::to_string(least) + " to " +
                     std::to_string(most) + ", or 0 for " + std::to_string(fallback));
}

bool IsHost(const std::string& host) {
  if (host.empty() || host.size() > 253) return false;
  const bool v6 = host.front() == '[';
  if (v6 && (host.size() < 4 || host.back() != ']')) return false;
  const std::string inner = v6 ? host.substr(1, host.size() - 2) : host;
  for (const char c : inner) {
    const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    if (v6 ? !(hex || c == ':' || c == '.') : !(IsIdCharacter(c) && c != ':')) return false;
  }
  return true;
}

}  // namespace

absl::Status CheckId(const std::string& id, const std::string& field, const std::string& reason) {
  if (IsId(id)) return absl::OkStatus();
  return Invalid(reason, field, "is " + Quoted(id) + "; allowed are " + IdRule());
}

absl::StatusOr<std::vector<BlockRange>> RunsFromProto(const google::protobuf::RepeatedPtrField<v1::BlockRun>& proto,
                                                      const std::string& field) {
  if (proto.size() > kMaxBlockRuns) {
    return Invalid("INVALID_BLOCKS", field,
                   "are " + std::to_string(proto.size()) + ", the limit is " + std::to_string(kMaxBlockRuns));
  }
  std::vector<BlockRange> runs;
  runs.reserve(static_cast<size_t>(proto.size()));
  for (int i = 0; i < proto.size(); ++i) {
    const v1::BlockRun& run = proto.Get(i);
    if (run.count() == 0 || run.first() > UINT64_MAX - run.count()) {
      return Invalid("INVALID_BLOCKS", field + "[" + std::to_string(i) + "]",
                     "is first " + std::to_string(run.first()) + ", count " + std::to_string(run.count()));
    }
    runs.push_back({run.first(), run.count()});
  }
  return runs;
}

absl::StatusOr<std::vector<GroupBlockList>> BlocksFromProto(
    const google::protobuf::RepeatedPtrField<v1::GroupBlocks>& proto) {
  if (proto.size() > kMaxGroups) {
    return Invalid("INVALID_BLOCKS", "blocks",
                   "are of " + std::to_string(proto.size()) + " groups, the limit is " + std::to_string(kMaxGroups));
  }
  std::vector<GroupBlockList> blocks;
  for (int i = 0; i < proto.size(); ++i) {
    auto runs = RunsFromProto(proto.Get(i).runs(), "blocks[" + std::to_string(i) + "].runs");
    if (!runs.ok()) return runs.status();
    blocks.push_back({proto.Get(i).group(), *std::move(runs), proto.Get(i).skip_tokens()});
  }
  return blocks;
}

absl::Status CheckTransferId(const std::string& id) { return CheckId(id, "transfer_id", "INVALID_TRANSFER_ID"); }
absl::Status CheckRequestId(const std::string& id) { return CheckId(id, "request_id", "INVALID_REQUEST_ID"); }

absl::Status CheckPoolRef(const v1::PoolRef& pool) {
  return CheckId(pool.pool_id(), "pool.pool_id", "INVALID_POOL_REF");
}

absl::Status CheckTransferToken(const std::string& token) {
  if (token.empty() || token.size() == kTransferTokenBytes) return absl::OkStatus();
  return Invalid("INVALID_TOKEN", "transfer_token",
                 "has " + std::to_string(token.size()) + " bytes, allowed are 0 and 16");
}

absl::Status CheckPeerAddress(const std::string& peer, const std::vector<std::string>& allowed_hosts) {
  const size_t colon = peer.rfind(':');
  bool good = colon != std::string::npos && IsHost(peer.substr(0, colon));
  uint32_t port = 0;
  if (good) {
    const std::string digits = peer.substr(colon + 1);
    good = !digits.empty() && digits.size() <= 5;
    for (const char c : digits) {
      good = good && c >= '0' && c <= '9';
      port = port * 10 + static_cast<uint32_t>(c - '0');
    }
  }
  if (!good || port < 1 || port > 65535)
    return Invalid("INVALID_PEER", "peer", "is " + Quoted(peer) + ", not host:port");
  if (AllowsHost(allowed_hosts, peer.substr(0, colon))) return absl::OkStatus();
  return MakeError(absl::StatusCode::kPermissionDenied, "PEER_NOT_ALLOWED",
                   "peer " + Quoted(peer) + " is not one of peer.allowed_hosts of this daemon", {{"peer", peer}});
}

absl::Status CheckLinkRate(double bytes_per_second) {
  if (std::isfinite(bytes_per_second) && bytes_per_second > 0) return absl::OkStatus();
  return Invalid("OUT_OF_RANGE", "link_bytes_per_second",
                 "is " + std::to_string(bytes_per_second) + "; it must be above 0 and finite");
}

absl::StatusOr<PartId> PartFromProto(bool present, const v1::Part& part) {
  if (!present) return PartId{};
  if (part.count() >= 1 && part.count() <= kMaxParts && part.index() < part.count()) return PartId{part.index(), part.count()};
  return Invalid("INVALID_PART", "part",
                 "is " + std::to_string(part.index()) + " of " + std::to_string(part.count()) + ", allowed are up to " +
                     std::to_string(kMaxParts) + " parts, counted from 0");
}

absl::Status CheckTokenCount(uint32_t tokens, const RequestDefaults& defaults) {
  if (tokens >= 1 && tokens <= defaults.max_tokens) return absl::OkStatus();
  return Invalid("OUT_OF_RANGE", "token_count",
                 "is " + std::to_string(tokens) + ", allowed are 1 to " + std::to_string(defaults.max_tokens));
}

absl::StatusOr<int64_t> DeadlineOf(uint64_t deadline_ms, const RequestDefaults& defaults) {
  return InRange(deadline_ms, defaults.deadline_ms, 1, defaults.max_deadline_ms, "deadline_ms");
}
absl::StatusOr<int64_t> LeaseTtlOf(uint64_t ttl_ms, const RequestDefaults& defaults) {
  return InRange(ttl_ms, defaults.lease_ttl_ms, defaults.min_lease_ttl_ms, defaults.max_lease_ttl_ms, "lease_ttl_ms");
}
absl::StatusOr<int64_t> UnregisterTimeoutOf(uint64_t timeout_ms, const RequestDefaults& defaults) {
  return InRange(timeout_ms, defaults.unregister_timeout_ms, 1, defaults.max_unregister_timeout_ms, "timeout_ms");
}

absl::StatusOr<std::optional<Role>> RoleFromProto(v1::TransferRole role) {
  switch (role) {
    case v1::TRANSFER_ROLE_UNSPECIFIED: return std::optional<Role>();
    case v1::TRANSFER_ROLE_SENDER: return std::optional<Role>(Role::kSender);
    case v1::TRANSFER_ROLE_RECEIVER: return std::optional<Role>(Role::kReceiver);
    default:
      return Invalid("INVALID_ROLE", "transfer.role", "is " + std::to_string(static_cast<int>(role)) + ", no role");
  }
}

absl::StatusOr<PlaneId> PlaneFromProto(v1::Plane plane) {
  if (plane == v1::PLANE_K) return PlaneId::kK;
  if (plane == v1::PLANE_V) return PlaneId::kV;
  return Invalid("INVALID_BLOCKS", "blocks.plane",
                 "is " + std::to_string(static_cast<int>(plane)) + ", allowed are PLANE_K and PLANE_V");
}

std::string FingerprintOf(const google::protobuf::MessageLite& request) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    request.SerializeToCodedStream(&coded);
  }
  // Two salted hashes and the length in place of the bytes, which may be megabytes of scores.
  const uint64_t parts[3] = {absl::HashOf(uint64_t{1}, bytes), absl::HashOf(uint64_t{2}, bytes), bytes.size()};
  std::string fingerprint(sizeof(parts), '\0');
  std::memcpy(fingerprint.data(), parts, sizeof(parts));
  return fingerprint;
}

}  // namespace spectrumkv

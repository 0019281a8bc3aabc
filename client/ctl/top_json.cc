// A frame of `top` for programs.
#include <google/protobuf/struct.pb.h>

#include "client/ctl/output.h"
#include "client/ctl/top_view.h"

namespace spectrumkv::ctl {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

Value Number(double number) {
  Value value;
  value.set_number_value(number);
  return value;
}

Value Text(const std::string& text) {
  Value value;
  value.set_string_value(text);
  return value;
}

Value Object(const std::map<std::string, double>& numbers) {
  Value value;
  Struct* const fields = value.mutable_struct_value();
  for (const auto& [key, number] : numbers) (*fields->mutable_fields())[key] = Number(number);
  return value;
}

Value RoleJson(const TopNumbers::Role& role) {
  Value value;
  auto& fields = *value.mutable_struct_value()->mutable_fields();
  fields["kv_bytes_per_second"] = Number(role.kv_bytes);
  fields["wire_bytes_per_second"] = Number(role.wire_bytes);
  if (role.ratio) fields["ratio"] = Number(*role.ratio);
  fields["ended_per_second"] = Object(role.outcomes);
  fields["tier_share"] = Object(role.tier_share);
  return value;
}

Value PeerJson(const TopNumbers::Peer& peer) {
  Value value;
  auto& fields = *value.mutable_struct_value()->mutable_fields();
  fields["address"] = Text(peer.address);
  fields["direction"] = Text(peer.direction);
  fields["last_error"] = Text(peer.last_error);
  fields["sessions_active"] = Number(static_cast<double>(peer.sessions_active));
  fields["sent_bytes_per_second"] = Number(peer.sent_bytes);
  fields["received_bytes_per_second"] = Number(peer.received_bytes);
  if (peer.link_bytes) fields["link_bytes_per_second"] = Number(*peer.link_bytes);
  return value;
}

}  // namespace

std::string TopJson(const Look& now, const TopNumbers& numbers, const std::string& clock) {
  Struct frame;
  auto& fields = *frame.mutable_fields();
  fields["time"] = Text(clock);
  fields["seconds"] = Number(numbers.seconds);
  fields["restarted"].set_bool_value(numbers.restarted);
  fields["version"] = Text(now.status.version());
  fields["backend"] = Text(now.status.backend());
  fields["ready"].set_bool_value(now.status.ready());
  fields["inflight_transfers"] = Number(now.status.inflight_transfers());
  fields["saved_bytes"] = Number(numbers.saved_bytes_ever);
  fields["sender"] = RoleJson(numbers.sender);
  fields["receiver"] = RoleJson(numbers.receiver);
  fields["errors_per_second"] = Object(numbers.errors);
  auto* const peers = fields["peers"].mutable_list_value();
  for (const TopNumbers::Peer& peer : numbers.peers) *peers->add_values() = PeerJson(peer);
  return ToJsonLine(frame);
}

}  // namespace spectrumkv::ctl

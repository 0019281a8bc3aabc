// What ReceiverTransfer does about refinements: as one, and as the transfer that may be refined later.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/base/status.h"
#include "server/transfer/receiver.h"
#include "server/transfer/rates.h"

namespace spectrumkv {
namespace {

// "ipv4:10.0.0.1:40000" and "ipv6:%5B::1%5D:40000", as gRPC names a peer, without the port; "" for anything else.
std::string HostOf(const std::string& peer) {
  for (const std::string& family : {std::string("ipv4:"), std::string("ipv6:")}) {
    if (peer.compare(0, family.size(), family) != 0) continue;
    const std::string host = PeerKey(peer.substr(family.size()), /*dialled=*/false);
    return absl::StrReplaceAll(host, {{"%5B", "["}, {"%5D", "]"}, {"%5b", "["}, {"%5d", "]"}});
  }
  return "";
}

}  // namespace

absl::StatusOr<TransferShape> ReceiverTransfer::ShapeOfPeer(const ManifestFrame& manifest) const {
  if (refinement_ == nullptr) return ShapeOfManifest(manifest, target_->schema());
  const TransferShape& shape = refinement_->choice().shape;
  for (const PlanLayer& layer : shape.layers) {
    if (layer.group < manifest.shape.groups.size() &&
        manifest.shape.groups[layer.group].data_type == static_cast<int32_t>(layer.dtype)) {
      continue;
    }
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MANIFEST",
                     absl::StrCat("the data type of group ", layer.group, " is not that of the transfer that is refined"));
  }
  return shape;
}

void ReceiverTransfer::SetPlaces() {
  if (refinement_ != nullptr) {
    decode_target_.places = refinement_->places();
    decode_target_.rows = &refinement_->choice().rows;
    return;
  }
  std::vector<LayerPlace> places;
  PlanLayersOf(target_->schema(), &places);
  for (const LayerPlace& place : places) decode_target_.places.push_back({place.group, place.layer_slot});
}

void ReceiverTransfer::NotePlaced(const ChunkView& view) {
  const ChunkCut& cut = cuts_[view.header.chunk_index];
  if (tiers_ != nullptr) tiers_->Set(cut.layer_index, cut.token_first, cut.token_count, view.tier_map());
  if (refinement_ != nullptr) refinement_->Arrived(cut, view.tier_map());
}

std::string ReceiverTransfer::SourceAddress() const {
  if (dials()) return peer_address();
  if (link_.control == nullptr || manifest_->retention->peer_port == 0) return "";
  const std::string host = HostOf(link_.control->peer());
  return host.empty() ? "" : absl::StrCat(host, ":", manifest_->retention->peer_port);
}

void ReceiverTransfer::KeepBase() {
  const TransferReport report = Snapshot();
  auto base = std::make_shared<RefineBase>();
  base->transfer_id = id();
  base->token = token();
  base->pool_id = report.pool_id;
  base->peer = SourceAddress();
  base->peer_epoch = peer_epoch();
  base->retain_ms = manifest_->retention->retain_ms;
  if (const int32_t tier = manifest_->retention->background_tier; tier != 0) {
    base->background_tier = static_cast<Tier>(tier - 1);
    base->background_direct = refine_direct_;
  }
  base->schema = target_->schema();
  base->shape = shape_;
  PlanLayersOf(target_->schema(), &base->places);
  base->ticket = target_->Ticket();
  base->device = target_->device();
  base->kv_bytes = report.kv_bytes;
  base->wire_bytes = report.wire_bytes;
  base->tiers = std::move(tiers_);
  if (base->ticket != nullptr) kept_ = host().KeepBase(std::move(base));
}

}  // namespace spectrumkv

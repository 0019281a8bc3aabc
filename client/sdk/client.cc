#include "spectrumkv/client.h"

#include <utility>

#include "client/cpp/blocks.h"
#include "client/cpp/client.h"
#include "client/sdk/convert.h"

namespace spectrumkv {
namespace {

constexpr size_t kPutMessageBytes = size_t{1} << 20;

void SetPart(const Part& part, v1::Part* out) {
  out->set_index(part.index);
  out->set_count(part.count);
}

void SetSkips(const std::vector<uint32_t>& skip_tokens, google::protobuf::RepeatedPtrField<v1::GroupBlocks>* blocks) {
  for (int i = 0; i < blocks->size() && static_cast<size_t>(i) < skip_tokens.size(); ++i) {
    blocks->Mutable(i)->set_skip_tokens(skip_tokens[static_cast<size_t>(i)]);
  }
}

template <typename Request>
Request HalfOf(const Source& source) {
  Request request;
  request.set_transfer_id(source.transfer_id);
  request.set_transfer_token(source.token);
  request.set_token_count(source.token_count);
  FillIn(source.blocks, request.mutable_blocks());
  SetSkips(source.skip_tokens, request.mutable_blocks());
  *request.mutable_policy() = ToProto(source.policy);
  request.set_deadline_ms(static_cast<uint64_t>(source.deadline_ms));
  request.set_layerwise(source.layerwise);
  SetPart(source.part, request.mutable_part());
  return request;
}

template <typename Request>
Request HalfOf(const Destination& destination) {
  Request request;
  request.set_transfer_id(destination.transfer_id);
  request.set_transfer_token(destination.token);
  request.set_token_count(destination.token_count);
  FillIn(destination.blocks, request.mutable_blocks());
  SetSkips(destination.skip_tokens, request.mutable_blocks());
  request.set_deadline_ms(static_cast<uint64_t>(destination.deadline_ms));
  request.set_accept_dropped(destination.accept_dropped);
  request.set_exact_conversion(destination.exact_conversion);
  SetPart(destination.part, request.mutable_part());
  return request;
}

Result<Report> ReportOf(const absl::StatusOr<v1::TransferReport>& report) {
  if (!report.ok()) return FromAbsl(report.status());
  return FromProto(*report);
}

}  // namespace

struct Pool::Impl {
  std::unique_ptr<client::Pool> pool;
};

Pool::Pool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pool::Pool(Pool&&) noexcept = default;
Pool& Pool::operator=(Pool&&) noexcept = default;
Pool::~Pool() = default;

std::string Pool::id() const { return impl_->pool->ref().pool_id(); }
uint64_t Pool::generation() const { return impl_->pool->generation(); }
Status Pool::status() const { return FromAbsl(impl_->pool->status()); }
bool Pool::WaitHeld(int64_t timeout_ms) const { return impl_->pool->WaitHeld(timeout_ms); }
Status Pool::Unregister(int64_t timeout_ms) { return FromAbsl(impl_->pool->Unregister(timeout_ms)); }

struct Client::Impl {
  std::unique_ptr<client::Client> client;
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

Result<Client> Client::Connect(const Options& options) {
  client::Client::Options inner;
  inner.address = options.address;
  inner.token_file = options.token_file;
  inner.connect_timeout_ms = options.connect_timeout_ms;
  inner.call_timeout_ms = options.call_timeout_ms;
  absl::StatusOr<std::unique_ptr<client::Client>> connected = client::Client::Connect(inner);
  if (!connected.ok()) return FromAbsl(connected.status());
  return Client(std::unique_ptr<Impl>(new Impl{*std::move(connected)}));
}

Result<Pool> Client::Register(const Cache& cache, int64_t lease_ttl_ms) {
  absl::StatusOr<std::unique_ptr<client::Pool>> pool = impl_->client->RegisterPool(ToProto(cache), lease_ttl_ms);
  if (!pool.ok()) return FromAbsl(pool.status());
  return Pool(std::unique_ptr<Pool::Impl>(new Pool::Impl{*std::move(pool)}));
}

Result<uint64_t> Client::Put(const Pool& pool, const std::vector<Block>& blocks) {
  auto block = blocks.begin();
  bool first = true;
  const auto next = [&](v1::PutBlocksRequest* message) {
    // One message at least: it names the pool.
    if (block == blocks.end() && !std::exchange(first, false)) return false;
    first = false;
    for (size_t bytes = 0; block != blocks.end(); ++block) {
      if (bytes > 0 && bytes + block->size_bytes > kPutMessageBytes) break;
      v1::BlockData* data = message->add_blocks();
      data->set_group(block->group);
      data->set_layer(block->layer);
      data->set_plane(block->plane == 0 ? v1::PLANE_K : block->plane == 1 ? v1::PLANE_V : v1::PLANE_UNSPECIFIED);
      data->set_block(block->block);
      data->set_data(block->data, block->size_bytes);
      bytes += block->size_bytes;
    }
    return true;
  };
  const absl::StatusOr<v1::PutBlocksResponse> response = impl_->client->PutBlocks(pool.impl_->pool->ref(), next);
  if (!response.ok()) return FromAbsl(response.status());
  return response->bytes();
}

Status Client::Get(const Pool& pool, uint32_t group, const std::vector<uint32_t>& layers,
                   const std::vector<uint64_t>& blocks, const std::function<Status(const Block&)>& sink) {
  v1::GetBlocksRequest request;
  *request.mutable_pool() = pool.impl_->pool->ref();
  request.set_group(group);
  request.mutable_layers()->Add(layers.begin(), layers.end());
  *request.mutable_runs() = client::Blocks(group, blocks).runs();
  Status refused;
  const auto give = [&](const v1::BlockData& data) {
    refused = sink({data.group(), data.layer(), data.plane() == v1::PLANE_V ? 1u : 0u, data.block(), data.data().data(),
                    data.data().size()});
    return ToAbsl(refused);
  };
  const Status status = FromAbsl(impl_->client->GetBlocks(request, give));
  return refused.ok() ? status : refused;
}

Result<PlanAnswer> Client::Plan(Pool& pool, const Source& source) {
  v1::PlanRequest request;
  request.set_token_count(source.token_count);
  FillIn(source.blocks, request.mutable_blocks());
  SetSkips(source.skip_tokens, request.mutable_blocks());
  *request.mutable_policy() = ToProto(source.policy);
  request.set_peer(source.peer);
  const absl::StatusOr<v1::PlanResponse> response = impl_->client->Plan(pool.impl_->pool.get(), std::move(request));
  if (!response.ok()) return FromAbsl(response.status());
  return FromProto(*response);
}

Status Client::Send(Pool& pool, const Source& source) {
  auto request = HalfOf<v1::SendRequest>(source);
  request.set_peer(source.peer);
  return FromAbsl(impl_->client->Send(pool.impl_->pool.get(), std::move(request)));
}

Status Client::Publish(Pool& pool, const Source& source) {
  return FromAbsl(impl_->client->Publish(pool.impl_->pool.get(), HalfOf<v1::PublishRequest>(source)));
}

Status Client::Expect(Pool& pool, const Destination& destination) {
  return FromAbsl(impl_->client->Expect(pool.impl_->pool.get(), HalfOf<v1::ExpectRequest>(destination)));
}

Status Client::Fetch(Pool& pool, const Destination& destination) {
  auto request = HalfOf<v1::FetchRequest>(destination);
  request.set_peer(destination.peer);
  return FromAbsl(impl_->client->Fetch(pool.impl_->pool.get(), std::move(request)));
}

Status Client::Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                       const std::vector<float>& scores, uint32_t part_index) {
  return FromAbsl(impl_->client->Advance(transfer_id, layers, tokens, scores, part_index));
}

Result<Report> Client::Wait(const std::string& transfer_id, const WaitOptions& options) {
  const auto on_event = [&options](const v1::WatchTransferResponse& event) {
    if (event.has_layers_ready() && options.on_layers_ready) options.on_layers_ready(event.layers_ready().layers());
    if (event.has_progress() && options.on_progress) options.on_progress(FromProto(event.progress()));
  };
  return ReportOf(impl_->client->Wait(ToProto(transfer_id, options.role), options.timeout_ms, on_event));
}

Result<Report> Client::GetTransfer(const std::string& transfer_id, Role role) {
  return ReportOf(impl_->client->Get(ToProto(transfer_id, role)));
}

Result<Report> Client::Cancel(const std::string& transfer_id, Role role) {
  return ReportOf(impl_->client->Cancel(ToProto(transfer_id, role)));
}

Status Client::Release(const std::string& transfer_id, Role role) {
  return FromAbsl(impl_->client->Release(ToProto(transfer_id, role)));
}

Status Client::ReportFirstToken(const std::string& transfer_id, double seconds, Role role) {
  return FromAbsl(impl_->client->ReportFirstToken(ToProto(transfer_id, role), seconds));
}

}  // namespace spectrumkv

// pools, pools create, pools renew, pools remove.
#include "client/ctl/pool_commands.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

using Worker = v1::WorkerService::Stub;

std::vector<Flag> Join(std::vector<Flag> a, const std::vector<Flag>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

absl::StatusOr<int> List(const Context& context, Args args) {
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto pools = CallAdmin(context.connection, &AdminStub::ListPools, v1::ListPoolsRequest());
  if (!pools.ok()) return pools.status();
  if (context.json) {
    std::fputs(ToJson(*pools).c_str(), stdout);
    return kOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"POOL", "MODEL", "STATE", "LAYERS", "KV", "BLOCKS", "SENDING", "RECEIVING", "LEASE", "OWNER"}};
  for (const v1::PoolInfo& pool : pools->pools()) {
    rows.push_back({pool.pool_id(), pool.model() + (pool.revision().empty() ? "" : "@" + pool.revision()), pool.state(),
                    std::to_string(pool.layers()), Bytes(pool.kv_bytes()), std::to_string(pool.blocks_total()),
                    std::to_string(pool.blocks_sending()), std::to_string(pool.blocks_receiving()),
                    Seconds(static_cast<double>(pool.lease_remaining_ms()) / 1000), pool.owner()});
  }
  std::fputs(Table(rows).c_str(), stdout);
  return kOk;
}

absl::StatusOr<int> Create(const Context& context, Args args) {
  client::DenseLayout layout = ReadShape(&args);
  args.Needed("blocks");
  layout.num_blocks = args.Number("blocks", 0, 1, UINT32_MAX);
  for (const char* needed : {"layers", "heads", "head-dim"}) args.Needed(needed);
  const int64_t lease_ms = ReadLease(&args);
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto pool = CreatePool(context, worker->get(), layout, lease_ms);
  if (!pool.ok()) return pool.status();
  if (context.json) {
    std::fputs(ToJson(*pool).c_str(), stdout);
  } else {
    std::printf("%s", Lines({{"pool", pool->pool().pool_id()},
                             {"epoch", std::to_string(pool->pool().epoch())},
                             {"blocks", std::to_string(layout.num_blocks)},
                             {"lease", Seconds(static_cast<double>(pool->lease_ttl_ms()) / 1000)}})
                          .c_str());
  }
  return kOk;
}

absl::StatusOr<int> Renew(const Context& context, Args args) {
  const auto pool = ReadPool(context, &args);
  if (!pool.ok()) return pool.status();
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  v1::RenewLeaseRequest request;
  *request.mutable_pool() = *pool;
  const auto renewed = CallWorker(worker->get(), context.connection, &Worker::RenewLease, request);
  if (!renewed.ok()) return renewed.status();
  if (context.json) {
    std::fputs(ToJson(*renewed).c_str(), stdout);
  } else {
    std::printf("lease: %s\n", Seconds(static_cast<double>(renewed->lease_ttl_ms()) / 1000).c_str());
  }
  return kOk;
}

absl::StatusOr<int> Remove(const Context& context, Args args) {
  const auto pool = ReadPool(context, &args);
  if (!pool.ok()) return pool.status();
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  v1::UnregisterPoolRequest request;
  *request.mutable_pool() = *pool;
  request.set_timeout_ms(static_cast<uint64_t>(context.connection.timeout_ms));
  const auto removed =
      CallWorker(worker->get(), context.connection, &Worker::UnregisterPool, request, context.connection.timeout_ms);
  if (!removed.ok()) return removed.status();
  if (context.json) std::puts("{}");
  return kOk;
}

}  // namespace

std::vector<Flag> PoolFlags() {
  return {{"pool", "ID", "a registered pool (spectrumkvctl pools)"},
          {"epoch", "N", "of the daemon; default: asked for on the admin socket"}};
}

absl::StatusOr<v1::PoolRef> ReadPool(const Context& context, Args* args) {
  v1::PoolRef pool;
  pool.set_pool_id(args->Needed("pool"));
  pool.set_epoch(args->Number("epoch", 0, 1, UINT64_MAX));
  if (args->Has("epoch") || pool.pool_id().empty()) return pool;
  const auto status = CallAdmin(context.connection, &AdminStub::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return status.status();
  pool.set_epoch(status->epoch());
  return pool;
}

std::vector<Flag> ShapeFlags() {
  return {{"layers", "N", "layers of the model"},
          {"heads", "N", "KV heads"},
          {"head-dim", "N", "values of a head"},
          {"dtype", "TYPE", "float16 (default), bfloat16 or float32"},
          {"block-tokens", "N", "tokens of a block; default 16"},
          {"model", "NAME", "compared with the peer's; default \"\""},
          {"revision", "NAME", "of the model; default \"\""},
          {"lease", "SECONDS", "how long the daemon keeps the pool; default 600"}};
}

client::DenseLayout ReadShape(Args* args) {
  client::DenseLayout layout;
  layout.layers = static_cast<uint32_t>(args->Number("layers", 0, 1, 4096));
  layout.heads = static_cast<uint32_t>(args->Number("heads", 0, 1, 1024));
  layout.head_dim = static_cast<uint32_t>(args->Number("head-dim", 0, 1, 65536));
  layout.data_type = args->DataType("dtype", v1::DATA_TYPE_FLOAT16);
  layout.block_tokens = static_cast<uint32_t>(args->Number("block-tokens", 16, 1, 256));
  layout.model = args->Text("model");
  layout.revision = args->Text("revision");
  return layout;
}

int64_t ReadLease(Args* args) { return args->Milliseconds("lease", 600 * 1000); }

absl::StatusOr<v1::RegisterPoolResponse> CreatePool(const Context& context, client::Client* worker,
                                                    const client::DenseLayout& layout, int64_t lease_ms) {
  const absl::StatusOr<uint64_t> bytes = client::BytesOf(layout);
  if (!bytes.ok()) return UsageError(std::string(bytes.status().message()));
  const auto schema = client::DenseSchema(layout, client::DaemonOwned(*bytes));
  if (!schema.ok()) return schema.status();
  v1::RegisterPoolRequest request;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  request.set_request_id("ctl-" + std::to_string(::getpid()) + "-" + std::to_string(now));
  *request.mutable_schema() = *schema;
  request.set_lease_ttl_ms(static_cast<uint64_t>(lease_ms));
  return CallWorkerPatiently(worker, context.connection, &Worker::RegisterPool, request);
}

std::vector<Command> PoolCommands() {
  return {
      {"pools", "", "registered pools", {}, List},
      {"pools create", "", "register a pool in memory of the daemon",
       Join(ShapeFlags(), {{"blocks", "N", "blocks of the pool"}}), Create},
      {"pools renew", "", "start the lease of a pool anew", PoolFlags(), Renew},
      {"pools remove", "", "give up a pool, once no transfer touches it", PoolFlags(), Remove},
  };
}

}  // namespace spectrumkv::ctl

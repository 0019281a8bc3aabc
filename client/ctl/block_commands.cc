// put, get: a KV cache between a file and a pool. Files are [layers, 2 (K, V), tokens, heads, head_dim], as .npy or as
// bare bytes in that order; bfloat16 is uint16 in .npy.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "client/cpp/blocks.h"
#include "client/ctl/npy.h"
#include "client/ctl/output.h"
#include "client/ctl/pool_commands.h"

namespace spectrumkv::ctl {
namespace {

constexpr size_t kMessageBytes = size_t{1} << 20;

bool IsNpy(const std::string& path) { return path.size() > 4 && path.compare(path.size() - 4, 4, ".npy") == 0; }

// A cache in memory, with the geometry that goes with it (num_blocks is not set).
struct Cache {
  client::DenseLayout layout;
  uint64_t tokens = 0;
  std::string data;

  uint64_t TokenBytes() const {
    return uint64_t{layout.heads} * layout.head_dim * client::ElementBytes(layout.data_type);
  }
};

absl::Status ShapeOfNpy(const Array& array, Cache* cache) {
  if (array.shape.size() != 5 || array.shape[1] != 2 || array.shape[0] > UINT32_MAX || array.shape[3] > UINT32_MAX ||
      array.shape[4] > UINT32_MAX) {
    return UsageError("the array must have the shape [layers, 2, tokens, heads, head_dim]");
  }
  if (std::count(array.shape.begin(), array.shape.end(), uint64_t{0}) != 0) {
    return UsageError("the array is empty: one of its sizes is 0");
  }
  cache->layout.layers = static_cast<uint32_t>(array.shape[0]);
  cache->tokens = array.shape[2];
  cache->layout.heads = static_cast<uint32_t>(array.shape[3]);
  cache->layout.head_dim = static_cast<uint32_t>(array.shape[4]);
  if (array.descr == "<f2") {
    cache->layout.data_type = v1::DATA_TYPE_FLOAT16;
  } else if (array.descr == "<f4") {
    cache->layout.data_type = v1::DATA_TYPE_FLOAT32;
  } else if (array.descr == "<u2") {
    cache->layout.data_type = v1::DATA_TYPE_BFLOAT16;
  } else {
    return UsageError("elements must be <f2 (float16), <f4 (float32) or <u2 (words of bfloat16), not " + array.descr);
  }
  return absl::OkStatus();
}

absl::Status ReadCache(const std::string& path, Cache* cache) {
  absl::StatusOr<std::string> file = ReadFile(path);
  if (!file.ok()) return file.status();
  if (IsNpy(path)) {
    absl::StatusOr<Array> array = ParseNpy(*file);
    if (!array.ok()) return array.status();
    if (const absl::Status status = ShapeOfNpy(*array, cache); !status.ok()) return status;
    cache->data = std::move(array->data);
  } else {
    const uint64_t planes_bytes = uint64_t{cache->layout.layers} * 2 * cache->TokenBytes();
    if (planes_bytes == 0) return UsageError("a file of bare bytes needs --layers, --heads and --head-dim");
    if (file->size() % planes_bytes != 0) {
      return UsageError("the file's " + std::to_string(file->size()) + " bytes are no multiple of the " +
                        std::to_string(planes_bytes) + " of one token");
    }
    cache->tokens = file->size() / planes_bytes;
    cache->data = *std::move(file);
  }
  if (cache->tokens == 0) return UsageError("the file holds no tokens");
  return absl::OkStatus();
}

// Cuts a cache into messages of PutBlocks.
class BlockWriter {
 public:
  BlockWriter(const Cache* cache, const std::vector<uint64_t>* blocks)
      : cache_(*cache), blocks_(*blocks), count_(client::BlocksFor(cache->tokens, cache->layout.block_tokens)) {}

  bool Next(v1::PutBlocksRequest* message) {
    size_t bytes = 0;
    while (plane_ < uint64_t{2} * cache_.layout.layers && (bytes == 0 || bytes < kMessageBytes)) {
      v1::BlockData* block = message->add_blocks();
      Fill(block);
      bytes += block->data().size();
      if (++index_ == count_) {
        index_ = 0;
        ++plane_;
      }
    }
    return bytes > 0;
  }

 private:
  void Fill(v1::BlockData* block) {
    const uint64_t token_bytes = cache_.TokenBytes();
    const uint64_t first = index_ * cache_.layout.block_tokens;
    const uint64_t tokens = std::min<uint64_t>(cache_.layout.block_tokens, cache_.tokens - first);
    std::string data(cache_.layout.block_tokens * token_bytes, '\0');
    std::memcpy(data.data(), cache_.data.data() + (plane_ * cache_.tokens + first) * token_bytes, tokens * token_bytes);
    block->set_layer(static_cast<uint32_t>(plane_ / 2));
    block->set_plane(plane_ % 2 == 0 ? v1::PLANE_K : v1::PLANE_V);
    block->set_block(blocks_[index_]);
    block->set_data(std::move(data));
  }

  const Cache& cache_;
  const std::vector<uint64_t>& blocks_;
  const uint64_t count_;  // blocks of each plane
  uint64_t plane_ = 0;    // layer * 2 + (V ? 1 : 0)
  uint64_t index_ = 0;
};

// The pool named by --pool, or a new one that holds the cache and is described in `created`.
absl::StatusOr<v1::PoolRef> PoolForPut(const Context& context, Args* args, client::Client* worker, Cache* cache,
                                       std::vector<uint64_t>* blocks) {
  const uint64_t needed = client::BlocksFor(cache->tokens, cache->layout.block_tokens);
  const int64_t lease_ms = ReadLease(args);
  if (args->Has("blocks")) {
    // A new pool has a block more than the last of these.
    *blocks = args->Ids("blocks", args->Has("pool") ? UINT64_MAX : UINT64_MAX - 1);
  } else {
    for (uint64_t id = 0; id < needed; ++id) blocks->push_back(id);
  }
  if (blocks->size() < needed) {
    args->Refuse(std::to_string(cache->tokens) + " tokens need " + std::to_string(needed) + " blocks, --blocks has " +
                 std::to_string(blocks->size()));
  }
  if (const absl::Status status = args->Check(1); !status.ok()) return status;
  if (args->Has("pool")) return ReadPool(context, args);
  cache->layout.num_blocks = *std::max_element(blocks->begin(), blocks->end()) + 1;
  const auto pool = CreatePool(context, worker, cache->layout, lease_ms);
  if (!pool.ok()) return pool.status();
  return pool->pool();
}

absl::StatusOr<int> Put(const Context& context, Args args) {
  Cache cache;
  cache.layout = ReadShape(&args);
  const std::string path = args.Positional(0, "FILE");
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  if (const absl::Status status = ReadCache(path, &cache); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  std::vector<uint64_t> blocks;
  const auto pool = PoolForPut(context, &args, worker->get(), &cache, &blocks);
  if (!pool.ok()) return pool.status();
  BlockWriter writer(&cache, &blocks);
  const auto put = (*worker)->PutBlocks(*pool, [&](v1::PutBlocksRequest* message) { return writer.Next(message); });
  if (!put.ok()) return put.status();
  if (context.json) {
    std::printf("{\"pool_id\": \"%s\", \"epoch\": \"%llu\", \"tokens\": %llu, \"blocks\": %llu, \"bytes\": %llu}\n",
                pool->pool_id().c_str(), static_cast<unsigned long long>(pool->epoch()),
                static_cast<unsigned long long>(cache.tokens), static_cast<unsigned long long>(put->blocks()),
                static_cast<unsigned long long>(put->bytes()));
  } else {
    std::fputs(Lines({{"pool", pool->pool_id()},
                      {"epoch", std::to_string(pool->epoch())},
                      {"tokens", std::to_string(cache.tokens)},
                      {"written", std::to_string(put->blocks()) + " blocks, " + Bytes(put->bytes())}})
                   .c_str(),
               stdout);
  }
  return kOk;
}

// Collects blocks in the order asked for; writes tokens back to back.
class BlockReader {
 public:
  BlockReader(const client::DenseLayout& layout, uint64_t tokens, const std::vector<uint64_t>& blocks)
      : tokens_(tokens) {
    cache_.layout = layout;
    for (const uint64_t id : blocks) order_.emplace(id, order_.size());
  }

  absl::Status Take(const v1::BlockData& block) {
    const uint64_t token_bytes = cache_.TokenBytes();
    const auto place = order_.find(block.block());
    if (block.data().size() % token_bytes != 0 || block.data().empty() || place == order_.end()) {
      return UsageError("a block of " + std::to_string(block.data().size()) +
                        " bytes does not fit --heads, --head-dim and --dtype");
    }
    const uint64_t block_tokens = block.data().size() / token_bytes;
    const uint64_t first = place->second * block_tokens;
    if (first >= tokens_) return absl::OkStatus();
    std::string& plane = planes_[{block.layer(), block.plane()}];
    plane.resize(tokens_ * token_bytes);
    const uint64_t tokens = std::min(block_tokens, tokens_ - first);
    std::memcpy(plane.data() + first * token_bytes, block.data().data(), tokens * token_bytes);
    covered_ += tokens;
    return absl::OkStatus();
  }

  // REQUIRES: all blocks taken.
  absl::StatusOr<Cache> Finish() {
    std::set<uint32_t> layers;
    for (const auto& [key, plane] : planes_) {
      layers.insert(key.first);
      cache_.data += plane;
    }
    if (covered_ != planes_.size() * tokens_ || planes_.size() != layers.size() * 2) {
      return UsageError("--blocks do not hold " + std::to_string(tokens_) + " tokens");
    }
    cache_.tokens = tokens_;
    cache_.layout.layers = static_cast<uint32_t>(layers.size());
    return std::move(cache_);
  }

 private:
  const uint64_t tokens_;
  Cache cache_;
  std::map<uint64_t, uint64_t> order_;                            // block id -> place in the table
  std::map<std::pair<uint32_t, v1::Plane>, std::string> planes_;  // in the order of the file
  uint64_t covered_ = 0;
};

absl::StatusOr<int> Get(const Context& context, Args args) {
  const client::DenseLayout layout = ReadShape(&args);
  const uint64_t tokens = args.Number("tokens", 0, 1, UINT32_MAX);
  for (const char* needed : {"tokens", "heads", "head-dim", "pool", "blocks", "out"}) args.Needed(needed);
  const std::vector<uint64_t> blocks = args.Ids("blocks");
  const std::string path = args.Text("out");
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  v1::GetBlocksRequest request;
  const auto pool = ReadPool(context, &args);
  if (!pool.ok()) return pool.status();
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  *request.mutable_pool() = *pool;
  *request.mutable_runs() = client::Blocks(0, blocks).runs();
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  BlockReader reader(layout, tokens, blocks);
  const absl::Status read =
      (*worker)->GetBlocks(request, [&](const v1::BlockData& block) { return reader.Take(block); });
  if (!read.ok()) return read;
  absl::StatusOr<Cache> cache = reader.Finish();
  if (!cache.ok()) return cache.status();
  const uint64_t bytes = cache->data.size();
  if (IsNpy(path)) {
    const v1::DataType type = layout.data_type;
    const char* descr = type == v1::DATA_TYPE_FLOAT32 ? "<f4" : type == v1::DATA_TYPE_BFLOAT16 ? "<u2" : "<f2";
    const Array array{descr, {cache->layout.layers, 2, tokens, layout.heads, layout.head_dim}, std::move(cache->data)};
    cache->data = FormatNpy(array);
  }
  if (const absl::Status status = WriteFile(path, cache->data); !status.ok()) return status;
  if (context.json) {
    std::printf("{\"layers\": %u, \"tokens\": %llu, \"bytes\": %llu}\n", cache->layout.layers,
                static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(bytes));
  } else {
    std::printf("%u layers, %llu tokens, %s\n", cache->layout.layers, static_cast<unsigned long long>(tokens),
                Bytes(bytes).c_str());
  }
  return kOk;
}

std::vector<Flag> WithPool(const std::vector<Flag>& more) {
  std::vector<Flag> flags = PoolFlags();
  const std::vector<Flag> shape = ShapeFlags();
  flags.insert(flags.end(), shape.begin(), shape.end());
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

}  // namespace

std::vector<Command> BlockCommands() {
  return {
      {"put", "FILE", "write a KV cache from a file (.npy or bare bytes) into a pool; without --pool into a new one",
       WithPool({{"blocks", "IDS", "where, in token order, as 0-15,20; default from 0 on"}}), Put},
      {"get", "", "read the tokens of some blocks into a file (.npy or bare bytes)",
       WithPool({{"blocks", "IDS", "the blocks in token order, as 0-15,20"},
                 {"tokens", "N", "how many tokens"},
                 {"out", "FILE", "where to; .npy or bare bytes by its name"}}),
       Get},
  };
}

}  // namespace spectrumkv::ctl

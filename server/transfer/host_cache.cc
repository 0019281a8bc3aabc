#include "server/transfer/host_cache.h"

#include <algorithm>
#include <map>
#include <new>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/retained_words.h"

namespace spectrumkv {
namespace {

// Between two looks at `stopped`.
constexpr uint64_t kCopyPieceBytes = 8 << 20;

// Memory that is given back with its last user, which may be the network.
class Words {
 public:
  Words(std::shared_ptr<StagingRoom> room, uint64_t bytes)
      : room_(std::move(room)), bytes_(bytes), memory_(new (std::nothrow) uint8_t[bytes]) {}
  ~Words() { room_->Give(bytes_); }
  uint8_t* data() const { return memory_.get(); }

 private:
  const std::shared_ptr<StagingRoom> room_;
  const uint64_t bytes_;
  const std::unique_ptr<uint8_t[]> memory_;
};

class CachedSource final : public OwnMemoryHold {
 public:
  CachedSource(const BlockHold& source, std::shared_ptr<Words> words)
      : schema_(DenseSchema(source.schema())), token_count_(source.token_count()), words_(std::move(words)) {}

  void Place(const TensorOfHold& tensor, uint64_t offset) { offsets_[KeyOf(tensor.group, tensor.layer_slot, tensor.plane)] = offset; }

  const PoolSchema& schema() const override { return schema_; }
  uint32_t token_count() const override { return token_count_; }
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override {
    const uint64_t row_bytes = schema_.groups[group].layers[layer_slot].k.token_stride_bytes;
    uint8_t* const first = words_->data() + offsets_.at(KeyOf(group, layer_slot, plane)) + token_first * row_bytes;
    for (uint32_t i = 0; i < count; ++i) rows[i] = first + i * row_bytes;
  }
  std::shared_ptr<const void> KeepMapped() const override { return words_; }

 private:
  using Key = std::tuple<uint32_t, uint32_t, PlaneId>;
  static Key KeyOf(uint32_t group, uint32_t layer_slot, PlaneId plane) { return {group, layer_slot, plane}; }

  const PoolSchema schema_;
  const uint32_t token_count_;
  const std::shared_ptr<Words> words_;
  std::map<Key, uint64_t> offsets_;
};

// Of all groups, once for each block of each.
std::vector<uint64_t> GenerationsOf(const BlockHold& source) {
  std::vector<uint64_t> generations;
  for (uint32_t group = 0; group < source.schema().groups.size(); ++group) {
    source.ReadGenerations(group, 0, source.token_count(), &generations);
  }
  return generations;
}

bool IsBeingWritten(const std::vector<uint64_t>& generations) {
  return std::any_of(generations.begin(), generations.end(), [](uint64_t g) { return g % 2 != 0; });
}

}  // namespace

uint64_t CachedBytes(const BlockHold& source, const std::vector<PlanLayer>& layers) {
  uint64_t bytes = 0;
  for (const PlanLayer& layer : layers) bytes += KvBytes(DimsOf(layer, 1));
  return bytes * source.token_count();
}

absl::StatusOr<std::shared_ptr<BlockHold>> CopySource(const BlockHold& source, const std::vector<PlanLayer>& layers,
                                                      const std::vector<LayerPlace>& places,
                                                      std::shared_ptr<StagingRoom> room,
                                                      const std::function<bool()>& stopped) {
  const uint64_t bytes = CachedBytes(source, layers);
  auto words = std::make_shared<Words>(std::move(room), bytes);
  if (words->data() == nullptr) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for ", bytes, " bytes of a retained source"));
  }
  auto copy = std::make_shared<CachedSource>(source, words);
  const std::vector<uint64_t> before = GenerationsOf(source);
  uint64_t offset = 0;
  const absl::Status copied = ForEachPiece(
      source, layers, places, kCopyPieceBytes,
      [&](const TensorOfHold& tensor, uint32_t first, uint32_t count, uint64_t row_bytes) -> absl::Status {
        if (stopped()) return absl::CancelledError("the source is no longer to be kept");
        if (first == 0) copy->Place(tensor, offset);
        absl::Status read = ReadRows(source, tensor, first, count, words->data() + offset);
        offset += count * row_bytes;
        return read;
      });
  if (!copied.ok()) return copied;
  if (IsBeingWritten(before) || GenerationsOf(source) != before) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SOURCE_CHANGED",
                     "a block of the retained source is being written, or has been while it was copied");
  }
  if (absl::Status whole = source.LookAtMemory(); !whole.ok()) return whole;
  if (absl::Status health = source.Health(); !health.ok()) return health;
  return std::shared_ptr<BlockHold>(std::move(copy));
}

}  // namespace spectrumkv

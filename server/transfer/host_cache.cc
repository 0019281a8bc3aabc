#include "server/transfer/host_cache.h"

#include <algorithm>
#include <map>
#include <new>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/pool/rows.h"

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

class CachedSource final : public BlockHold {
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
  absl::Status ZeroTail(uint32_t) const override { return absl::OkStatus(); }
  void ReadGenerations(uint32_t, uint32_t, uint32_t, std::vector<uint64_t>*) const override {}
  bool has_generations() const override { return false; }
  absl::Status Health() const override { return absl::OkStatus(); }
  std::shared_ptr<const void> KeepMapped() const override { return words_; }
  absl::Status LookAtMemory() const override { return absl::OkStatus(); }
  void OnLost(std::function<void(absl::Status)>) override {}

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

absl::Status CopyTensor(const BlockHold& source, const TensorOfHold& tensor, uint8_t* dense,
                        const std::function<bool()>& stopped) {
  const uint64_t row_bytes = DenseRowBytes(source, tensor);
  const auto step = static_cast<uint32_t>(std::max<uint64_t>(1, kCopyPieceBytes / row_bytes));
  for (uint32_t first = 0; first < source.token_count(); first += step) {
    if (stopped()) return absl::CancelledError("the source is no longer to be kept");
    const uint32_t count = std::min(step, source.token_count() - first);
    if (absl::Status read = ReadRows(source, tensor, first, count, dense + first * row_bytes); !read.ok()) return read;
  }
  return absl::OkStatus();
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
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      if (plane == PlaneId::kV && !layers[l].has_v) continue;
      const TensorOfHold tensor{places[l].group, places[l].layer_slot, plane};
      copy->Place(tensor, offset);
      if (absl::Status copied = CopyTensor(source, tensor, words->data() + offset, stopped); !copied.ok()) return copied;
      offset += DenseRowBytes(source, tensor) * source.token_count();
    }
  }
  if (IsBeingWritten(before) || GenerationsOf(source) != before) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SOURCE_CHANGED",
                     "a block of the retained source is being written, or has been while it was copied");
  }
  if (absl::Status whole = source.LookAtMemory(); !whole.ok()) return whole;
  if (absl::Status health = source.Health(); !health.ok()) return health;
  return std::shared_ptr<BlockHold>(std::move(copy));
}

}  // namespace spectrumkv

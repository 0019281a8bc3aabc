#include "server/transfer/scan_chunks.h"

#include <algorithm>

#include "server/encode/device_encode.h"
#include "server/scan/device_scan.h"
#include "server/scan/scan.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kTogetherKvBytes = 2 << 20;

bool Samples(const EncodeSource& source, const ChunkCut& cut, const ScanWish& wish) {
  return wish.samples && (wish.scans || !source.shape->layers[cut.layer_index].raw_only);
}

void ScanHere(const Backend& backend, const EncodeSource& source, const ChunkCut& cut, const ScanWish& wish,
              LayerScan* out) {
  const bool samples = Samples(source, cut, wish);
  if (!wish.scans && !samples) return;
  EncodeScratch& scratch = ThreadEncodeScratch();
  const SourcePlanes planes = PlanesOf(source, cut, &scratch);
  if (wish.scans) {
    ScanLayer(backend, planes.dims, planes.k, planes.values(), {cut.token_first, cut.token_count}, out);
  }
  if (samples) {
    SpreadChunk(backend, planes.dims, planes.k, planes.values(), cut.token_first, wish.pinned, &scratch.workspace, out);
  }
}

}  // namespace

size_t ChunksAtATime(const EncodeSource& source) {
  if (source.hold->device() == nullptr) return 1;
  uint64_t largest = 1;
  for (const PlanLayer& layer : source.shape->layers) {
    const uint32_t tokens = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
    largest = std::max(largest, KvBytes(DimsOf(layer, std::min(tokens, source.shape->kept_count()))));
  }
  return std::clamp<uint64_t>(kTogetherKvBytes / largest, 1, gpu::kMaxBatch);
}

absl::Status ScanChunks(const Backend& backend, const EncodeSource& source, absl::Span<const ChunkCut> cuts,
                        const ScanWish& wish, std::vector<LayerScan>* scans) {
  Device* const device = source.hold->device();
  std::vector<DeviceScan> on_device;
  std::vector<const ChunkCut*> of;
  for (const ChunkCut& cut : cuts) {
    LayerScan* const out = &(*scans)[cut.layer_index];
    if (device == nullptr) {
      ScanHere(backend, source, cut, wish, out);
      continue;
    }
    const DeviceScan chunk{DimsOf(source.shape->layers[cut.layer_index], cut.token_count), cut.token_first, out, wish.scans,
                           Samples(source, cut, wish), wish.pinned};
    if (!chunk.scans && !chunk.samples) continue;
    on_device.push_back(chunk);
    of.push_back(&cut);
  }
  if (on_device.empty()) return absl::OkStatus();
  std::vector<uint8_t*>* const rows = &ThreadEncodeScratch().k_rows;
  return ScanOnDevice(device, on_device,
                      [&](size_t i, PlaneId plane) { return DeviceRowsOf(source, *of[i], plane, rows); });
}

absl::Status ScanAllChunks(const Backend& backend, const EncodeSource& source, absl::Span<const ChunkCut> cuts,
                           const ScanWish& wish, std::vector<LayerScan>* scans) {
  for (const size_t step = ChunksAtATime(source); !cuts.empty(); cuts.remove_prefix(std::min(step, cuts.size()))) {
    if (absl::Status done = ScanChunks(backend, source, cuts.subspan(0, step), wish, scans); !done.ok()) return done;
  }
  return absl::OkStatus();
}

void MakeRoomForScans(const std::vector<PlanLayer>& layers, uint32_t tokens, const ScanWish& wish,
                      std::vector<LayerScan>* scans) {
  scans->resize(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    LayerScan& scan = (*scans)[i];
    if (wish.scans) scan.k.resize(tokens);
    if (wish.scans && layers[i].has_v) scan.v.resize(tokens);
    if (wish.samples) scan.k_spread.resize(tokens);
    if (wish.samples && layers[i].has_v) scan.v_spread.resize(tokens);
  }
}

}  // namespace spectrumkv

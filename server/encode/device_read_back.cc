#include <cstring>

#include "server/encode/device_encode.h"
#include "server/encode/reconstruction.h"

namespace spectrumkv {
namespace {

const gpu::TokenRun kOneRun{};

// [tokens, heads, head_dim] without gaps; its one run lies at `run` on the device.
gpu::DevicePlane DensePlaneOf(const ChunkDims& dims, uint8_t* base, const gpu::TokenRun* run) {
  const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype)), head = word * dims.head_dim;
  return gpu::DevicePlane{base, run, 1, head * dims.heads, head, word};
}

}  // namespace

absl::Status ReadBackOnDevice(const EncodeSource& source, const ChunkCut& cut, const ChunkDims& dims, const uint8_t* data,
                              size_t size, EncodeScratch* scratch, std::vector<uint8_t>* dense) {
  auto lane = source.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  const uint32_t step = ComparedStep(dims.tokens), planes = dims.has_v ? 2 : 1;
  ChunkDims some = dims;
  some.tokens = (dims.tokens + step - 1) / step;
  const size_t token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  const size_t some_bytes = planes * some.tokens * token_bytes;
  TierCounts all_raw;
  all_raw.k[0] = some.tokens;
  all_raw.v[0] = dims.has_v ? some.tokens : 0;
  const ChunkLayout raw = LayoutOf(some, all_raw);

  LaneMemory memory;
  const auto k_runs = memory.Take(RunsBytes(some.tokens));
  const auto v_runs = memory.Take(dims.has_v ? RunsBytes(some.tokens) : 0);
  const auto dense_run = memory.Take(sizeof(kOneRun));
  const auto tiers = memory.Take(some.tokens);
  const auto coded = memory.Take(size);
  const auto original = memory.Take(raw.chunk_bytes);
  const auto compared = memory.Take(some_bytes);
  const auto report = memory.TakeOnDevice(sizeof(gpu::ChunkReport));
  const auto decoded = memory.TakeOnDevice(planes * dims.tokens * token_bytes);
  const auto workspace = memory.TakeOnDevice(gpu::WorkspaceBytes(dims));
  if (!memory.Map(&*lane)) return lane->Finish();
  std::memcpy(memory.host(dense_run), &kOneRun, sizeof(kOneRun));
  std::memset(memory.host(tiers), 0, some.tokens);  // RAW
  std::memcpy(memory.host(coded), data, size);

  gpu::EncodeJob encode;
  encode.dims = some;
  const auto plane_of = [&](PlaneId plane, const LaneMemory::Part& runs, std::vector<uint8_t*>* rows) {
    const DeviceRows compared_rows = DeviceRowsOf(source, cut, plane, rows);
    KeepCompared(dims.tokens, rows);
    return PlaneOf(compared_rows, some.tokens, memory, runs);
  };
  encode.k = plane_of(PlaneId::kK, k_runs, &scratch->k_rows);
  if (dims.has_v) encode.v = plane_of(PlaneId::kV, v_runs, &scratch->v_rows);
  encode.tiers = memory.device(tiers);
  encode.chunk = memory.device(original);
  encode.capacity = original.bytes;
  encode.report = memory.device<gpu::ChunkReport>(report);
  gpu::DecodeJob decode;
  decode.dims = dims;
  decode.chunk = memory.device(coded);
  decode.target = dims.dtype;
  const auto* run = memory.device<gpu::TokenRun>(dense_run);
  decode.k = DensePlaneOf(dims, memory.device(decoded), run);
  if (dims.has_v) decode.v = DensePlaneOf(dims, memory.device(decoded) + dims.tokens * token_bytes, run);
  decode.report = encode.report;

  memory.Upload(k_runs, coded);
  lane->Encode(&encode, 1, memory.device(workspace), workspace.bytes);
  lane->Decode(&decode, 1, memory.device(workspace), workspace.bytes);
  memory.Download(original, original);
  for (uint32_t p = 0; p < planes; ++p) {
    lane->CopyRows({memory.host(compared) + p * some.tokens * token_bytes, token_bytes},
                   {memory.device(decoded) + p * dims.tokens * token_bytes, step * token_bytes}, token_bytes, some.tokens);
  }
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  dense->resize(2 * some_bytes);
  std::memcpy(dense->data(), memory.host(original) + raw.codes[kCodesRaw].offset, some_bytes);
  std::memcpy(dense->data() + some_bytes, memory.host(compared), some_bytes);
  return absl::OkStatus();
}

}  // namespace spectrumkv

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

// Where the parts of one chunk lie in the lane's memory.
struct ReadBackParts {
  ChunkDims some;  // of the tokens compared
  uint32_t planes = 1;
  size_t token_bytes = 0;
  ChunkLayout raw;  // of those tokens as a chunk of their own
  LaneMemory::Part k_runs, v_runs, tiers, coded;  // up
  LaneMemory::Part original, compared;            // down
  LaneMemory::Part decoded, report;               // of the device alone
  size_t plane_bytes() const { return some.tokens * token_bytes; }
};

ReadBackParts PartsFor(const ReadBack& chunk, LaneMemory* memory) {
  const ChunkDims& dims = chunk.dims;
  ReadBackParts of;
  const uint32_t step = ComparedStep(dims.tokens);
  of.some = dims;
  of.some.tokens = (dims.tokens + step - 1) / step;
  of.planes = dims.has_v ? 2 : 1;
  of.token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  TierCounts all_raw;
  all_raw.k[0] = of.some.tokens;
  all_raw.v[0] = dims.has_v ? of.some.tokens : 0;
  of.raw = LayoutOf(of.some, all_raw);
  of.k_runs = memory->Take(RunsBytes(of.some.tokens));
  of.v_runs = memory->Take(dims.has_v ? RunsBytes(of.some.tokens) : 0);
  of.tiers = memory->Take(of.some.tokens);
  of.coded = memory->Take(chunk.size);
  return of;
}

gpu::EncodeJob OriginalsOf(const EncodeSource& source, const ReadBack& chunk, const ReadBackParts& parts,
                           const LaneMemory& memory, EncodeScratch* scratch) {
  gpu::EncodeJob job;
  job.dims = parts.some;
  const auto plane_of = [&](PlaneId plane, const LaneMemory::Part& runs, std::vector<uint8_t*>* rows) {
    const DeviceRows compared_rows = DeviceRowsOf(source, *chunk.cut, plane, rows);
    KeepCompared(chunk.dims.tokens, rows);
    return PlaneOf(compared_rows, parts.some.tokens, memory, runs);
  };
  job.k = plane_of(PlaneId::kK, parts.k_runs, &scratch->k_rows);
  if (chunk.dims.has_v) job.v = plane_of(PlaneId::kV, parts.v_runs, &scratch->v_rows);
  std::memset(memory.host(parts.tiers), 0, parts.some.tokens);  // RAW
  job.tiers = memory.device(parts.tiers);
  job.chunk = memory.device(parts.original);
  job.capacity = parts.original.bytes;
  job.report = memory.device<gpu::ChunkReport>(parts.report);
  return job;
}

gpu::DecodeJob DecodingOf(const ReadBack& chunk, const ReadBackParts& parts, const LaneMemory& memory,
                          const gpu::TokenRun* one_run) {
  gpu::DecodeJob job;
  job.dims = chunk.dims;
  std::memcpy(memory.host(parts.coded), chunk.data, chunk.size);
  job.chunk = memory.device(parts.coded);
  job.target = chunk.dims.dtype;
  job.k = DensePlaneOf(chunk.dims, memory.device(parts.decoded), one_run);
  if (chunk.dims.has_v) {
    job.v = DensePlaneOf(chunk.dims, memory.device(parts.decoded) + chunk.dims.tokens * parts.token_bytes, one_run);
  }
  job.report = memory.device<gpu::ChunkReport>(parts.report);
  return job;
}

void DownloadCompared(const ReadBack& chunk, const ReadBackParts& parts, const LaneMemory& memory, DeviceLane* lane) {
  const size_t step = ComparedStep(chunk.dims.tokens);
  for (uint32_t p = 0; p < parts.planes; ++p) {
    lane->CopyRows({memory.host(parts.compared) + p * parts.plane_bytes(), parts.token_bytes},
                   {memory.device(parts.decoded) + p * chunk.dims.tokens * parts.token_bytes, step * parts.token_bytes},
                   parts.token_bytes, parts.some.tokens);
  }
}

void TakeDense(const ReadBackParts& parts, const LaneMemory& memory, std::vector<uint8_t>* dense) {
  const size_t bytes = parts.planes * parts.plane_bytes();
  dense->resize(2 * bytes);
  std::memcpy(dense->data(), memory.host(parts.original) + parts.raw.codes[kCodesRaw].offset, bytes);
  std::memcpy(dense->data() + bytes, memory.host(parts.compared), bytes);
}

std::vector<ReadBackParts> TakeParts(const std::vector<ReadBack>& chunks, LaneMemory* memory) {
  std::vector<ReadBackParts> parts;
  for (const ReadBack& chunk : chunks) parts.push_back(PartsFor(chunk, memory));
  for (ReadBackParts& of : parts) of.original = memory->Take(of.raw.chunk_bytes);
  for (ReadBackParts& of : parts) of.compared = memory->Take(of.planes * of.plane_bytes());
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].decoded = memory->TakeOnDevice(parts[i].planes * chunks[i].dims.tokens * parts[i].token_bytes);
    parts[i].report = memory->TakeOnDevice(sizeof(gpu::ChunkReport));
  }
  return parts;
}

}  // namespace

absl::Status ReadBackOnDevice(const EncodeSource& source, EncodeScratch* scratch, std::vector<ReadBack>* chunks) {
  auto lane = source.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const auto dense_run = memory.Take(sizeof(kOneRun));
  const std::vector<ReadBackParts> parts = TakeParts(*chunks, &memory);
  size_t workspace_bytes = 0;  // of the decodes, which come behind the encodes and have no fewer tokens
  for (const ReadBack& chunk : *chunks) workspace_bytes += gpu::WorkspaceBytes(chunk.dims);
  const auto workspace = memory.TakeOnDevice(workspace_bytes);
  if (!memory.Map(&*lane)) return lane->Finish();
  std::memcpy(memory.host(dense_run), &kOneRun, sizeof(kOneRun));
  std::vector<gpu::EncodeJob> encodes;
  std::vector<gpu::DecodeJob> decodes;
  for (size_t i = 0; i < parts.size(); ++i) {
    encodes.push_back(OriginalsOf(source, (*chunks)[i], parts[i], memory, scratch));
    decodes.push_back(DecodingOf((*chunks)[i], parts[i], memory, memory.device<gpu::TokenRun>(dense_run)));
  }
  memory.Upload(dense_run, parts.back().coded);
  ForEachKindInWorkspace(encodes, [&](const gpu::EncodeJob* first, uint32_t count, size_t offset, size_t bytes) {
    lane->Encode(first, count, memory.device(workspace) + offset, bytes);
  });
  ForEachKindInWorkspace(decodes, [&](const gpu::DecodeJob* first, uint32_t count, size_t offset, size_t bytes) {
    lane->Decode(first, count, memory.device(workspace) + offset, bytes);
  });
  memory.Download(parts.front().original, parts.back().original);
  for (size_t i = 0; i < parts.size(); ++i) DownloadCompared((*chunks)[i], parts[i], memory, &*lane);
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  for (size_t i = 0; i < parts.size(); ++i) TakeDense(parts[i], memory, &(*chunks)[i].dense);
  return absl::OkStatus();
}

}  // namespace spectrumkv

// What one job needs in a lane's memory: parts that are laid out once, at the same offsets in pinned memory of the host
// and in memory of the device, and copied between the two as a whole or in part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/memory/device.h"

namespace spectrumkv {

// Take all parts, Map, use. Of one job; nothing is queued on the lane when it is mapped.
class LaneMemory {
 public:
  struct Part {
    size_t offset = 0, bytes = 0;
  };
  Part Take(size_t bytes) {
    const Part part = TakeOnDevice(bytes);
    pinned_bytes_ = bytes_;
    return part;
  }
  // Of the device alone. Behind all that the host shares.
  Part TakeOnDevice(size_t bytes) {
    const Part part{bytes_, bytes};
    bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return part;
  }

  // False where there is no memory: the lane's Finish says so.
  [[nodiscard]] bool Map(DeviceLane* lane) {
    lane_ = lane;
    host_ = lane->Pinned(pinned_bytes_);
    device_ = lane->OnDevice(bytes_);
    return host_ != nullptr && device_ != nullptr;
  }

  // REQUIRES of all: mapped; but for device(), a part that the host shares.
  template <typename T = uint8_t>
  T* host(const Part& part) const {
    return reinterpret_cast<T*>(host_ + part.offset);
  }
  template <typename T = uint8_t>
  T* device(const Part& part) const {
    return reinterpret_cast<T*>(device_ + part.offset);
  }
  // Queued: everything from the first part to the last, in one copy.
  void Upload(const Part& first, const Part& last) { CopyParts(device_, host_, first, last); }
  void Download(const Part& first, const Part& last) { CopyParts(host_, device_, first, last); }

 private:
  static constexpr size_t kAlign = 256;
  void CopyParts(uint8_t* to, const uint8_t* from, const Part& first, const Part& last) {
    lane_->Copy(to + first.offset, from + first.offset, last.offset + last.bytes - first.offset);
  }
  size_t bytes_ = 0, pinned_bytes_ = 0;
  DeviceLane* lane_ = nullptr;
  uint8_t* host_ = nullptr;
  uint8_t* device_ = nullptr;
};

// Calls launch(first, count) for each run of jobs of one kind.
template <typename Job, typename Launch>
void ForEachKind(const std::vector<Job>& jobs, const Launch& launch) {
  for (size_t first = 0, next; first < jobs.size(); first = next) {
    next = first + 1;
    while (next < jobs.size() && gpu::SameKind(jobs[first], jobs[next])) ++next;
    launch(&jobs[first], static_cast<uint32_t>(next - first));
  }
}

// The same for jobs that work in a workspace, which has WorkspaceBytes for each: launch(first, count, offset, bytes), of
// which [offset, offset + bytes) is theirs.
template <typename Job, typename Launch>
void ForEachKindInWorkspace(const std::vector<Job>& jobs, const Launch& launch) {
  size_t offset = 0;
  ForEachKind(jobs, [&](const Job* first, uint32_t count) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; ++i) bytes += gpu::WorkspaceBytes(first[i].dims);
    launch(first, count, offset, bytes);
    offset += bytes;
  });
}

// Tokens in the memory of a GPU, one address for each, as BlockHold::FillRows gives them.
struct DeviceRows {
  uint8_t* const* rows = nullptr;
  int64_t token_stride_bytes = 0;  // inside of a block
  int64_t head_stride_bytes = 0;
  int64_t dim_stride_bytes = 0;
};

// Bytes that the runs of so many tokens may take.
inline size_t RunsBytes(uint32_t tokens) { return tokens * sizeof(gpu::TokenRun); }

// The plane of a job; its runs are written to runs.host and read from runs.device once they have been uploaded.
inline gpu::DevicePlane PlaneOf(const DeviceRows& rows, uint32_t tokens, const LaneMemory& memory,
                                const LaneMemory::Part& runs) {
  gpu::DevicePlane plane;
  plane.base = rows.rows[0];
  plane.runs = memory.device<gpu::TokenRun>(runs);
  plane.run_count =
      gpu::RunsOf(rows.rows, tokens, plane.base, rows.token_stride_bytes, memory.host<gpu::TokenRun>(runs));
  plane.token_stride_bytes = rows.token_stride_bytes;
  plane.head_stride_bytes = rows.head_stride_bytes;
  plane.dim_stride_bytes = rows.dim_stride_bytes;
  return plane;
}

}  // namespace spectrumkv

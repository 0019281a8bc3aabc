// A backend made of one CellOps table: order of sections, escapes, centres, header and checksum are the same code for
// every instruction set of the CPU.
#pragma once

#include "kernels/codec/backend.h"
#include "kernels/codec/cell_ops.h"

namespace spectrumkv {

class TableBackend final : public Backend {
 public:
  // `ops` is immortal. `supported`: this machine has its instructions.
  TableBackend(const CellOps& ops, bool supported) : ops_(ops), supported_(supported) {}

  const char* name() const override { return ops_.name; }
  bool supported() const override { return supported_; }

  EncodeResult Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k, const SourcePlane* v,
                      const uint8_t* tiers, Workspace* workspace, uint8_t* out, uint64_t capacity) const override;
  EncodeResult FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                        const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const override;
  DecodeResult Decode(const ChunkView& chunk, DType target, const TargetPlane& k, const TargetPlane* v,
                      Workspace* workspace) const override;
  void Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const override;
  void Spread(const ChunkDims& dims, const SourcePlane& plane, bool centred, uint32_t skip, Workspace* workspace,
              uint8_t* out) const override;
  void Attend(const ChunkDims& dims, const SourcePlane& k, uint32_t head, const AttendQueries& queries,
              Workspace* workspace, float* out) const override;

 private:
  const CellOps& ops_;
  const bool supported_;
};

}  // namespace spectrumkv

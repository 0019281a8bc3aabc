// A backend that passes everything to another one: what a test's backend leaves alone.
#pragma once

#include <vector>

#include "kernels/codec/backend.h"

namespace spectrumkv {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(const Backend* inner) : inner_(inner) {}
  const char* name() const override { return inner_->name(); }
  bool supported() const override { return true; }
  EncodeResult Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k, const SourcePlane* v,
                      const uint8_t* tiers, Workspace* workspace, uint8_t* out, uint64_t capacity) const override {
    return inner_->Encode(dims, identity, k, v, tiers, workspace, out, capacity);
  }
  EncodeResult FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                        const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const override {
    return inner_->FrameRaw(dims, identity, k, v, head, words);
  }
  DecodeResult Decode(const ChunkView& chunk, DType target, const TargetPlane& k, const TargetPlane* v,
                      Workspace* workspace) const override {
    return inner_->Decode(chunk, target, k, v, workspace);
  }
  void Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const override {
    inner_->Scan(dims, plane, out);
  }
  void Spread(const ChunkDims& dims, const SourcePlane& plane, bool centred, uint32_t skip, Workspace* workspace,
              uint8_t* out) const override {
    inner_->Spread(dims, plane, centred, skip, workspace, out);
  }
  void Attend(const ChunkDims& dims, const SourcePlane& k, uint32_t head, const AttendQueries& queries,
              Workspace* workspace, float* out) const override {
    inner_->Attend(dims, k, head, queries, workspace, out);
  }

 private:
  const Backend* const inner_;
};

}  // namespace spectrumkv

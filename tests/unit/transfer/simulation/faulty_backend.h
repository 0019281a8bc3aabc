// The codec as a seam: passes everything to a real backend, and lets a test change what it has encoded.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "kernels/codec/backend.h"

namespace spectrumkv {

class FaultyBackend final : public Backend {
 public:
  // `bytes` of a finished chunk (of FrameRaw: its head), checksum included.
  using Spoil = std::function<void(uint8_t* bytes, uint64_t size)>;

  explicit FaultyBackend(const Backend* inner) : inner_(inner) {}
  // Not while another thread encodes.
  void SpoilEncoded(Spoil spoil) { spoil_ = std::move(spoil); }
  // The next Encode says that its room was too small.
  void OverflowOnce() { overflow_ = true; }

  const char* name() const override { return inner_->name(); }
  bool supported() const override { return true; }
  EncodeResult Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k, const SourcePlane* v,
                      const uint8_t* tiers, Workspace* workspace, uint8_t* out, uint64_t capacity) const override {
    if (std::exchange(overflow_, false)) return {};
    const EncodeResult result = inner_->Encode(dims, identity, k, v, tiers, workspace, out, capacity);
    if (spoil_ && result.chunk_bytes > 0) spoil_(out, result.chunk_bytes);
    return result;
  }
  EncodeResult FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                        const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const override {
    const EncodeResult result = inner_->FrameRaw(dims, identity, k, v, head, words);
    uint64_t lent = 0;
    for (const Piece& piece : *words) lent += piece.size;
    if (spoil_ && result.chunk_bytes > lent) spoil_(head, result.chunk_bytes - lent);
    return result;
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

 private:
  const Backend* const inner_;
  Spoil spoil_;
  mutable bool overflow_ = false;
};

}  // namespace spectrumkv

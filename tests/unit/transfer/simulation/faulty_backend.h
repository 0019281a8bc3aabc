// The codec as a seam: passes everything to a real backend, and lets a test change what it has encoded.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/unit/transfer/forwarding_backend.h"

namespace spectrumkv {

class FaultyBackend final : public ForwardingBackend {
 public:
  // `bytes` of a finished chunk (of FrameRaw: its head), checksum included.
  using Spoil = std::function<void(uint8_t* bytes, uint64_t size)>;

  using ForwardingBackend::ForwardingBackend;
  // An Encode that has begun may still call the one before.
  void SpoilEncoded(Spoil spoil) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spoil_ = spoil ? std::make_shared<const Spoil>(std::move(spoil)) : nullptr;
  }
  // The next Encode says that its room was too small. Not while another thread encodes.
  void OverflowOnce() { overflow_ = true; }

  EncodeResult Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k, const SourcePlane* v,
                      const uint8_t* tiers, Workspace* workspace, uint8_t* out, uint64_t capacity) const override {
    if (overflow_.exchange(false)) return {};
    const EncodeResult result = ForwardingBackend::Encode(dims, identity, k, v, tiers, workspace, out, capacity);
    if (result.chunk_bytes > 0) DoSpoil(out, result.chunk_bytes);
    return result;
  }
  EncodeResult FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                        const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const override {
    const EncodeResult result = ForwardingBackend::FrameRaw(dims, identity, k, v, head, words);
    uint64_t lent = 0;
    for (const Piece& piece : *words) lent += piece.size;
    if (result.chunk_bytes > lent) DoSpoil(head, result.chunk_bytes - lent);
    return result;
  }

 private:
  void DoSpoil(uint8_t* bytes, uint64_t size) const {
    std::shared_ptr<const Spoil> spoil;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      spoil = spoil_;
    }
    if (spoil != nullptr) (*spoil)(bytes, size);
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Spoil> spoil_;
  mutable std::atomic<bool> overflow_{false};
};

}  // namespace spectrumkv

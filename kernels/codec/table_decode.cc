// The decoding half of TableBackend.
#include <algorithm>
#include <cstring>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/raw_words.h"
#include "kernels/codec/read_cursors.h"
#include "kernels/codec/table_backend.h"
#include "kernels/codec/token_runs.h"

namespace spectrumkv {
namespace {

// One checked chunk being read into planes of one dtype.
class ChunkReader {
 public:
  // means: [heads, head_dim]; scratch: the values of one token in the target's dtype, used where dims are strided;
  // bounce: the codes of one token, where they lie in two pieces.
  ChunkReader(const CellOps& ops, const ChunkView& chunk, DType target, float* means, uint8_t* scratch,
              uint8_t* bounce)
      : ops_(ops),
        chunk_(chunk),
        dims_(chunk.dims),
        target_(target),
        word_(SizeOf(target)),
        means_(means),
        scratch_(scratch),
        bounce_(bounce),
        cursors_(chunk) {}

  void ReadKeys(const TargetPlane& k) {
    const bool centred = chunk_.layout.centre_codes.bytes != 0;
    for (uint32_t first = 0; first < dims_.tokens; first += kCentreTokens) {
      Centres centres;
      if (centred) centres = ReadCentre(first / kCentreTokens);
      ReadTokens(k, first, std::min(first + kCentreTokens, dims_.tokens), 0, centres);
    }
  }

  void ReadValues(const TargetPlane& v) { ReadTokens(v, 0, dims_.tokens, 4, {}); }

  uint64_t rounded_words() const { return rounded_words_; }

 private:
  // Centres have the coding of P8 cells.
  Centres ReadCentre(size_t run) {
    const uint8_t* scales = chunk_.metadata + chunk_.layout.centre_scales.offset + run * dims_.heads * 2;
    const uint8_t* codes = chunk_.metadata + chunk_.layout.centre_codes.offset + run * dims_.heads * dims_.head_dim;
    const int64_t stride = static_cast<int64_t>(dims_.head_dim * sizeof(float));
    uint8_t* const row = reinterpret_cast<uint8_t*>(means_);
    const uint8_t* const row_in = row;
    ops_.decode(CellsOut{&row, 1, stride, dims_.heads, dims_.head_dim, DType::kFloat32}, Tier::kP8, {}, scales, codes);
    const uint32_t magnitude =
        ops_.magnitude(CellsIn{&row_in, 1, 0, stride, dims_.heads, dims_.head_dim, DType::kFloat32});
    return Centres{means_, BitsFloat(magnitude)};
  }

  // Tokens of one tier are read together.
  void ReadTokens(const TargetPlane& plane, uint32_t first, uint32_t end, int shift, const Centres& centres) {
    const bool strided = plane.dim_stride_bytes != static_cast<int64_t>(word_);
    const uint8_t* tiers = chunk_.tier_map();
    for (uint32_t t = first, run = 0; t < end; t += run) {
      const int id = tiers[t] >> shift & 15;
      run = 1;
      while (!strided && t + run < end && (tiers[t + run] >> shift & 15) == id) ++run;
      CellsOut cells{plane.rows + t, run, plane.head_stride_bytes, dims_.heads, dims_.head_dim, target_};
      if (strided) {
        cells.rows = &scratch_;
        cells.head_stride_bytes = static_cast<int64_t>(dims_.head_dim * word_);
      }
      ReadRun(cells, static_cast<Tier>(id), centres);
      if (strided) Scatter(cells, plane, t);
    }
  }

  void ReadRun(const CellsOut& cells, Tier tier, const Centres& centres) {
    const size_t token_bytes = size_t{dims_.heads} * CellBytes(tier, dims_.head_dim, dims_.dtype);
    const uint8_t* scales = tier == Tier::kRaw ? nullptr : cursors_.TakeScales(tier, uint64_t{cells.tokens} * dims_.heads);
    const size_t scale_bytes = tier == Tier::kRaw ? 0 : dims_.heads * (HasScale8(tier) ? 1 : 2);
    CellsOut part = cells;
    for (uint32_t done = 0; done < cells.tokens; done += part.tokens) {
      part.rows = cells.rows + done;
      part.tokens = cells.tokens - done;
      const uint8_t* codes = cursors_.TakeCodes(tier, token_bytes, &part.tokens, bounce_);
      if (tier == Tier::kRaw) {
        ReadRaw(part, codes, token_bytes);
      } else {
        ops_.decode(part, tier, IsRotated(tier) ? centres : Centres{}, scales + done * scale_bytes, codes);
      }
    }
  }

  // Tokens that lie one after another in the target are one copy.
  void ReadRaw(const CellsOut& cells, const uint8_t* words, size_t token_bytes) {
    const bool dense = cells.head_stride_bytes == static_cast<int64_t>(dims_.head_dim * word_);
    if (!dense || target_ != dims_.dtype) {
      for (uint32_t t = 0; t < cells.tokens; ++t) ConvertToken(cells, cells.rows[t], words + t * token_bytes);
      return;
    }
    for (uint32_t t = 0, run = 0; t < cells.tokens; t += run) {
      run = ContiguousTokens(cells.rows + t, cells.tokens - t, token_bytes);
      ops_.store(cells.rows[t], words + t * token_bytes, run * token_bytes);
    }
  }

  void ConvertToken(const CellsOut& cells, uint8_t* to, const uint8_t* words) {
    const size_t cell_bytes = size_t{dims_.head_dim} * SizeOf(dims_.dtype);
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      rounded_words_ +=
          ConvertWords(words + h * cell_bytes, dims_.dtype, to + h * cells.head_stride_bytes, target_, dims_.head_dim);
    }
  }

  void Scatter(const CellsOut& cells, const TargetPlane& plane, uint32_t token) const {
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      const uint8_t* from = scratch_ + h * cells.head_stride_bytes;
      uint8_t* to = plane.rows[token] + h * plane.head_stride_bytes;
      for (uint32_t d = 0; d < dims_.head_dim; ++d, from += word_, to += plane.dim_stride_bytes) {
        if (word_ == 2) {
          std::memcpy(to, from, 2);
        } else {
          std::memcpy(to, from, 4);
        }
      }
    }
  }

  const CellOps& ops_;
  const ChunkView& chunk_;
  const ChunkDims& dims_;
  const DType target_;
  const size_t word_;
  float* means_;
  uint8_t* const scratch_;
  uint8_t* const bounce_;
  ReadCursors cursors_;
  uint64_t rounded_words_ = 0;
};

}  // namespace

DecodeResult TableBackend::Decode(const ChunkView& chunk, DType target, const TargetPlane& k, const TargetPlane* v,
                                  Workspace* workspace) const {
  const size_t values = size_t{chunk.dims.heads} * chunk.dims.head_dim;
  const size_t room = values * sizeof(float);  // no coded token is longer
  uint8_t* scratch = workspace->Reserve(3 * room);
  ChunkReader reader(ops_, chunk, target, reinterpret_cast<float*>(scratch), scratch + room, scratch + 2 * room);
  reader.ReadKeys(k);
  if (chunk.dims.has_v) reader.ReadValues(*v);
  return DecodeResult{reader.rounded_words()};
}

}  // namespace spectrumkv

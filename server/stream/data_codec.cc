#include "server/stream/data_codec.h"

#include <algorithm>

#include "server/stream/frame_codec.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kOpenTag = (1 << 3) | 2;
constexpr uint32_t kChunkTag = (2 << 3) | 2;
constexpr size_t kMaxOpenBytes = 1024;

// Reads across pieces; never past the end.
class Cursor {
 public:
  explicit Cursor(const std::vector<ByteSpan>& pieces) : pieces_(pieces) {
    for (const ByteSpan& piece : pieces) left_ += piece.size;
  }
  size_t offset() const { return offset_; }
  size_t left() const { return left_; }

  bool Byte(uint8_t* out) {
    if (left_ == 0) return false;
    while (at_ == pieces_[piece_].size) Next();
    *out = pieces_[piece_].data[at_];
    Advance(1);
    return true;
  }
  // Tags and lengths have at most five bytes, as protobuf reads them.
  bool Varint(uint64_t* out, int max_bytes = 5) {
    uint64_t value = 0;
    for (int shift = 0; shift < 7 * max_bytes; shift += 7) {
      uint8_t byte = 0;
      if (!Byte(&byte)) return false;
      if (shift == 63 && byte > 1) return false;  // more than 64 bits
      value |= uint64_t{byte & 0x7Fu} << shift;
      if ((byte & 0x80) == 0) {
        *out = value;
        return true;
      }
    }
    return false;
  }
  bool Skip(uint64_t bytes) {
    if (bytes > left_) return false;
    while (bytes > 0) {
      if (at_ == pieces_[piece_].size) Next();
      const size_t step = std::min<uint64_t>(bytes, pieces_[piece_].size - at_);
      Advance(step);
      bytes -= step;
    }
    return true;
  }
  bool Copy(size_t bytes, std::string* out) {
    if (bytes > left_) return false;
    out->clear();
    while (out->size() < bytes) {
      if (at_ == pieces_[piece_].size) Next();
      const size_t step = std::min(bytes - out->size(), pieces_[piece_].size - at_);
      out->append(reinterpret_cast<const char*>(pieces_[piece_].data) + at_, step);
      Advance(step);
    }
    return true;
  }

 private:
  void Next() {
    ++piece_;
    at_ = 0;
  }
  void Advance(size_t bytes) {
    at_ += bytes;
    offset_ += bytes;
    left_ -= bytes;
  }
  const std::vector<ByteSpan>& pieces_;
  size_t piece_ = 0, at_ = 0, offset_ = 0, left_ = 0;
};

// A field this version does not know. Groups (wire types 3, 4) are not proto3.
bool SkipField(uint64_t tag, Cursor* cursor) {
  uint64_t value = 0;
  switch (tag & 7) {
    case 0: return cursor->Varint(&value, 10);
    case 1: return cursor->Skip(8);
    case 2: return cursor->Varint(&value) && cursor->Skip(value);
    case 5: return cursor->Skip(4);
    default: return false;
  }
}

absl::StatusOr<DataOpenFrame> ReadOpen(Cursor* cursor) {
  uint64_t bytes = 0;
  std::string text;
  if (!cursor->Varint(&bytes)) return MalformedFrame("open", "is cut short");
  if (bytes > kMaxOpenBytes) return MalformedFrame("open", "is longer than 1024 bytes");
  if (!cursor->Copy(bytes, &text)) return MalformedFrame("open", "is cut short");
  v1::DataOpen proto;
  if (!proto.ParseFromString(text)) return MalformedFrame("open", "does not parse");
  return DataOpenFromProto(proto);
}

}  // namespace

absl::StatusOr<DataMessage> ParseDataMessage(const std::vector<ByteSpan>& pieces) {
  Cursor cursor(pieces);
  DataMessage message;
  bool found = false;
  while (cursor.left() > 0) {
    uint64_t tag = 0;
    if (!cursor.Varint(&tag)) return MalformedFrame("frame", "has a broken tag");
    if (tag == kChunkTag) {
      uint64_t bytes = 0;
      if (!cursor.Varint(&bytes)) return MalformedFrame("chunk", "is cut short");
      const size_t offset = cursor.offset();
      if (!cursor.Skip(bytes)) return MalformedFrame("chunk", "is cut short");
      message = ChunkExtent{offset, static_cast<size_t>(bytes)};
      found = true;
    } else if (tag == kOpenTag) {
      absl::StatusOr<DataOpenFrame> open = ReadOpen(&cursor);
      if (!open.ok()) return open.status();
      message = *std::move(open);
      found = true;
    } else if (tag < 8 || tag > 0xFFFFFFFFu || !SkipField(tag, &cursor)) {
      return MalformedFrame("frame", "has a broken field");
    }
  }
  if (!found) return MalformedFrame("frame", "is missing or of a kind unknown here");
  return message;
}

size_t MessageBytes(const DataOpenFrame& open) { return SerializeDataOpen(open).size(); }

std::string SerializeDataOpen(const DataOpenFrame& open) {
  v1::DataRequest request;
  *request.mutable_open() = DataOpenToProto(open);
  return request.SerializeAsString();
}

size_t WriteChunkPrefix(size_t chunk_bytes, uint8_t out[kMaxChunkPrefixBytes]) {
  size_t n = 0;
  out[n++] = kChunkTag;
  uint64_t value = chunk_bytes;
  for (; value >= 0x80; value >>= 7) out[n++] = static_cast<uint8_t>(value | 0x80);
  out[n++] = static_cast<uint8_t>(value);
  return n;
}

}  // namespace spectrumkv

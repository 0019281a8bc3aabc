// codec check DIR: vectors as tests/golden/vectors has them. index.json lists
//   cases        NAME.in (words of K, then V), NAME.tiers -> NAME.chunk -> NAME.out
//   decode_only  NAME.chunk -> NAME.out
//   must_fail    must_fail/NAME.chunk -> the reason
#include <cinttypes>
#include <cstdio>
#include <string>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "client/ctl/codec.h"
#include "client/ctl/npy.h"

namespace spectrumkv::ctl {
namespace {

using google::protobuf::Struct;

struct Counts {
  uint64_t encoded = 0, decoded = 0, refused = 0;
  std::vector<std::string> differences;
};

uint64_t Number(const Struct& entry, const char* key) {
  const auto field = entry.fields().find(key);
  return field == entry.fields().end() ? 0 : static_cast<uint64_t>(field->second.number_value());
}
std::string Text(const Struct& entry, const char* key) {
  const auto field = entry.fields().find(key);
  return field == entry.fields().end() ? "" : field->second.string_value();
}

struct Vector {
  std::string name;
  ChunkDims dims;
  ChunkIdentity identity;
  uint32_t escaped = 0;
};

absl::Status ReadVector(const Struct& entry, Vector* vector) {
  vector->name = Text(entry, "name");
  const auto has_v = entry.fields().find("v_present");
  const uint64_t tokens = Number(entry, "tokens"), heads = Number(entry, "heads"), head_dim = Number(entry, "head_dim"),
                 dtype = Number(entry, "dtype");
  // What a codec may be called with; anything else is the folder's mistake.
  if (tokens < 1 || tokens > kMaxChunkTokens || heads < 1 || heads > kMaxHeads || head_dim < 8 ||
      head_dim > kMaxHeadDim || head_dim % 8 != 0 || dtype < 1 || dtype > 3 || vector->name.empty() ||
      vector->name.find('/') != std::string::npos) {
    return UsageError("index.json: vector \"" + vector->name + "\" has no valid shape");
  }
  vector->dims = ChunkDims{static_cast<uint32_t>(tokens), static_cast<uint32_t>(heads), static_cast<uint32_t>(head_dim),
                           static_cast<DType>(dtype), has_v == entry.fields().end() || has_v->second.bool_value()};
  vector->identity.chunk_index = static_cast<uint32_t>(Number(entry, "chunk_index"));
  vector->identity.group = static_cast<uint16_t>(Number(entry, "group"));
  vector->identity.layer = static_cast<uint16_t>(Number(entry, "layer"));
  vector->identity.token_first = static_cast<uint32_t>(Number(entry, "token_first"));
  vector->identity.head_first = static_cast<uint16_t>(Number(entry, "head_first"));
  vector->escaped = static_cast<uint32_t>(Number(entry, "escaped_tokens"));
  return absl::OkStatus();
}

const uint8_t* Data(const std::string& text) { return reinterpret_cast<const uint8_t*>(text.data()); }

int64_t HeadStride(const ChunkDims& dims) { return static_cast<int64_t>(dims.head_dim * SizeOf(dims.dtype)); }

// "" where the bytes are those of `chunk`.
std::string EncodeDifference(const Backend& backend, const Vector& vector, const std::string& in,
                             const std::string& tiers, const std::string& chunk) {
  const ChunkDims& dims = vector.dims;
  if (in.size() != KvBytes(dims) || tiers.size() != dims.tokens) return "the files do not have the size of the shape";
  for (const char tier : tiers) {
    const auto byte = static_cast<uint8_t>(tier);
    if ((byte & 15) >= kTierCount || (byte >> 4) >= kTierCount) return "its .tiers name a tier that does not exist";
  }
  const auto k_rows = Rows(Data(in), dims), v_rows = Rows(Data(in) + in.size() / 2, dims);
  const auto word = static_cast<int64_t>(SizeOf(dims.dtype));
  const SourcePlane k{k_rows.data(), HeadStride(dims), word}, v{v_rows.data(), HeadStride(dims), word};
  Workspace workspace;
  std::string out(MaxChunkBytes(dims), '\0');
  const EncodeResult result = backend.Encode(dims, vector.identity, k, dims.has_v ? &v : nullptr, Data(tiers),
                                             &workspace, reinterpret_cast<uint8_t*>(out.data()), out.size());
  out.resize(result.chunk_bytes);
  if (out.size() != chunk.size()) {
    return "encoded to " + std::to_string(out.size()) + " bytes instead of " + std::to_string(chunk.size());
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != chunk[i]) return "encoded byte " + std::to_string(i) + " differs";
  }
  return result.escaped == vector.escaped
             ? ""
             : std::to_string(result.escaped) + " tokens escaped instead of " + std::to_string(vector.escaped);
}

std::string DecodeDifference(const Backend& backend, const ChunkDims& dims, const std::string& chunk,
                             const std::string& expected) {
  ChunkView view;
  const Refusal refusal = ParseChunk(Data(chunk), chunk.size(), &view);
  if (refusal != Refusal::kNone) return std::string("refused: ") + RefusalName(refusal);
  if (view.dims.tokens != dims.tokens || view.dims.heads != dims.heads || view.dims.head_dim != dims.head_dim ||
      view.dims.dtype != dims.dtype || view.dims.has_v != dims.has_v || expected.size() != KvBytes(dims)) {
    return "the files do not have the size of the shape";
  }
  std::string out(expected.size(), '\xA5');
  auto* words = reinterpret_cast<uint8_t*>(out.data());
  const auto k_rows = Rows(words, dims), v_rows = Rows(words + out.size() / 2, dims);
  const auto word = static_cast<int64_t>(SizeOf(dims.dtype));
  const TargetPlane k{k_rows.data(), HeadStride(dims), word}, v{v_rows.data(), HeadStride(dims), word};
  Workspace workspace;
  backend.Decode(view, dims.dtype, k, dims.has_v ? &v : nullptr, &workspace);
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != expected[i]) return "decoded byte " + std::to_string(i) + " differs";
  }
  return "";
}

void Note(const std::string& where, const std::string& difference, Counts* counts) {
  if (!difference.empty()) counts->differences.push_back(where + ": " + difference);
}

// The 64-bit fence does not survive JSON's doubles: it is taken from the chunk itself, where its place is fixed.
uint64_t FenceOf(const std::string& chunk) {
  ChunkHeader header{};
  if (chunk.size() >= sizeof(header)) std::memcpy(&header, chunk.data(), sizeof(header));
  return header.fence;
}

absl::Status CheckVector(const std::string& folder, const Struct& entry, bool both_ways,
                         const std::vector<const Backend*>& backends, Counts* counts) {
  Vector vector;
  if (const absl::Status status = ReadVector(entry, &vector); !status.ok()) return status;
  const std::string base = folder + "/" + vector.name;
  const auto chunk = ReadFile(base + ".chunk"), out = ReadFile(base + ".out");
  if (!chunk.ok()) return chunk.status();
  if (!out.ok()) return out.status();
  vector.identity.fence = FenceOf(*chunk);
  std::string in, tiers;
  if (both_ways) {
    for (const auto& [suffix, text] : {std::pair{".in", &in}, std::pair{".tiers", &tiers}}) {
      absl::StatusOr<std::string> file = ReadFile(base + suffix);
      if (!file.ok()) return file.status();
      *text = *std::move(file);
    }
  }
  for (const Backend* backend : backends) {
    const std::string where = std::string(backend->name()) + " " + vector.name;
    if (both_ways) {
      Note(where, EncodeDifference(*backend, vector, in, tiers, *chunk), counts);
      ++counts->encoded;
    }
    Note(where, DecodeDifference(*backend, vector.dims, *chunk, *out), counts);
    ++counts->decoded;
  }
  return absl::OkStatus();
}

absl::Status CheckRefusal(const std::string& folder, const Struct& entry, Counts* counts) {
  const std::string name = Text(entry, "name"), reason = Text(entry, "reason");
  const auto chunk = ReadFile(folder + "/must_fail/" + name + ".chunk");
  if (!chunk.ok()) return chunk.status();
  ChunkView view;
  const char* given = RefusalName(ParseChunk(Data(*chunk), chunk->size(), &view));
  Note("must_fail " + name, given == reason ? "" : std::string(given) + " instead of " + reason, counts);
  ++counts->refused;
  return absl::OkStatus();
}

absl::Status CheckFolder(const std::string& folder, const std::vector<const Backend*>& backends, Counts* counts) {
  const auto text = ReadFile(folder + "/index.json");
  if (!text.ok()) return text.status();
  Struct index;
  if (!google::protobuf::util::JsonStringToMessage(*text, &index).ok()) {
    return UsageError(folder + "/index.json is no JSON object");
  }
  for (const auto& [list, values] : index.fields()) {
    if (list != "cases" && list != "decode_only" && list != "must_fail") {
      return UsageError("index.json: unknown list \"" + list + "\"");
    }
    for (const auto& value : values.list_value().values()) {
      const Struct& entry = value.struct_value();
      const absl::Status status = list == "must_fail" ? CheckRefusal(folder, entry, counts)
                                                      : CheckVector(folder, entry, list == "cases", backends, counts);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> CodecCheck(const Context& context, Args args) {
  const std::string folder = args.Positional(0, "DIR");
  const auto backends = ChooseBackends(args.Text("backend"));
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  if (!backends.ok()) return backends.status();
  Counts counts;
  if (const absl::Status status = CheckFolder(folder, *backends, &counts); !status.ok()) return status;
  if (counts.encoded + counts.decoded + counts.refused == 0) return UsageError(folder + " has no vectors");
  for (const std::string& difference : counts.differences) std::fprintf(stderr, "%s\n", difference.c_str());
  std::string names;
  for (const Backend* backend : *backends) names += (names.empty() ? "" : ", ") + std::string(backend->name());
  std::printf(context.json ? "{\"backends\": \"%s\", \"encoded\": %" PRIu64 ", \"decoded\": %" PRIu64
                             ", \"refused\": %" PRIu64 ", \"differences\": %zu}\n"
                           : "backends %s: %" PRIu64 " encoded, %" PRIu64 " decoded, %" PRIu64
                             " refused, "
                             "%zu differences\n",
              names.c_str(), counts.encoded, counts.decoded, counts.refused, counts.differences.size());
  return counts.differences.empty() ? kOk : kCheckFailed;
}

}  // namespace spectrumkv::ctl

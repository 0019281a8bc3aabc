// Whatever a peer writes on its streams. The first byte chooses the kind (even: a control frame, odd: a Data message
// cut into pieces of its size / 2): it is refused, or means what protobuf says it means, and never crashes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "server/base/status.h"
#include "server/stream/data_codec.h"
#include "server/stream/frame_codec.h"

namespace spectrumkv {
namespace {

void Check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

void CheckRefusal(const absl::Status& status) {
  Check(status.code() == absl::StatusCode::kInvalidArgument, "a refusal is INVALID_ARGUMENT");
  Check(ReasonOf(status) == "MALFORMED_FRAME", "a refusal is MALFORMED_FRAME");
  Check(!MetadataOf(status)["field"].empty(), "a refusal names the field");
}

void RunControl(const std::string& bytes) {
  v1::ControlRequest request;
  if (!request.ParseFromString(bytes)) return;
  const absl::StatusOr<ControlFrame> frame = FrameFromProto(request.frame());
  if (!frame.ok()) return CheckRefusal(frame.status());
  const v1::ControlFrame again = FrameToProto(*frame);
  const absl::StatusOr<ControlFrame> second = FrameFromProto(again);
  Check(second.ok(), "what was accepted is accepted again");
  Check(FrameToProto(*second).SerializeAsString() == again.SerializeAsString(), "a frame keeps its fields");
}

void RunData(const std::string& bytes, size_t piece_bytes) {
  std::vector<ByteSpan> pieces;
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  for (size_t at = 0; at < bytes.size(); at += piece_bytes) {
    pieces.push_back({data + at, std::min(piece_bytes, bytes.size() - at)});
  }
  const absl::StatusOr<DataMessage> message = ParseDataMessage(pieces);
  if (!message.ok()) return CheckRefusal(message.status());
  v1::DataRequest request;
  Check(request.ParseFromString(bytes), "what is accepted is protobuf");
  if (const auto* extent = std::get_if<ChunkExtent>(&*message)) {
    Check(extent->bytes <= bytes.size() && extent->offset <= bytes.size() - extent->bytes,
          "a chunk lies in its message");
    Check(request.frame_case() == v1::DataRequest::kChunk, "a chunk is a chunk");
    Check(request.chunk() == bytes.substr(extent->offset, extent->bytes), "the chunk's bytes");
  } else {
    Check(request.frame_case() == v1::DataRequest::kOpen, "an open is an open");
    Check(!std::get<DataOpenFrame>(*message).transfer_id.empty(), "an open has an id");
  }
}

}  // namespace
}  // namespace spectrumkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // As the daemon does (peer_server.cc): protobuf would write a line of every text that is no UTF-8.
  static const google::protobuf::LogSilencer silence;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    spectrumkv::RunControl(bytes);
  } else {
    spectrumkv::RunData(bytes, 1 + data[0] / 2u);
  }
  return 0;
}

#include "server/base/status.h"

#include <gtest/gtest.h>

namespace spectrumkv {
namespace {

TEST(StatusTest, CarriesReasonMetadataAndRetryDelay) {
  const absl::Status status = MakeError(absl::StatusCode::kResourceExhausted, "STAGING_FULL", "no slot",
                                        {{"slots", "32"}, {"partition", "send"}}, 250);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(status.message()), "no slot");
  EXPECT_EQ(ReasonOf(status), "STAGING_FULL");
  EXPECT_EQ(MetadataOf(status), (Metadata{{"slots", "32"}, {"partition", "send"}}));
  EXPECT_EQ(RetryAfterMsOf(status), 250);
}

TEST(StatusTest, RetryDelayOfZeroIsADelay) {
  EXPECT_EQ(RetryAfterMsOf(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "m", {}, 0)), 0);
  EXPECT_EQ(RetryAfterMsOf(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "m", {}, -1)), -1);
}

TEST(StatusTest, PlainStatusHasNone) {
  for (const absl::Status& status : {absl::OkStatus(), absl::InternalError("x")}) {
    EXPECT_EQ(ReasonOf(status), "");
    EXPECT_TRUE(MetadataOf(status).empty());
    EXPECT_EQ(RetryAfterMsOf(status), -1);
  }
}

TEST(StatusTest, AnyBytesSurviveInMetadata) {
  const std::string bytes("a\0b\n\xff/=", 7);
  const Metadata metadata = {{"", ""}, {"key/with=signs", bytes}};
  const absl::Status copy = MakeError(absl::StatusCode::kNotFound, "R", "", metadata);
  EXPECT_EQ(MetadataOf(copy), metadata);
}

TEST(StatusTest, ForeignPayloadsAreIgnored) {
  absl::Status status = MakeError(absl::StatusCode::kNotFound, "R", "m", {{"a", "1"}});
  status.SetPayload("type.googleapis.com/other", absl::Cord("x"));
  EXPECT_EQ(MetadataOf(status), (Metadata{{"a", "1"}}));
  absl::Status bad = absl::InternalError("x");
  bad.SetPayload("spectrumkv/retry_after_ms", absl::Cord("soon"));
  EXPECT_EQ(RetryAfterMsOf(bad), -1);
}

}  // namespace
}  // namespace spectrumkv

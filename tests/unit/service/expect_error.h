// What a refusal says: its code and its reason.
#pragma once

#include "gtest/gtest.h"
#include "server/base/status.h"

#define EXPECT_ERROR(status_expression, expected_code, expected_reason)              \
  do {                                                                               \
    const absl::Status error_status = (status_expression);                           \
    EXPECT_EQ(error_status.code(), absl::StatusCode::expected_code) << error_status; \
    EXPECT_EQ(ReasonOf(error_status), expected_reason) << error_status;              \
  } while (false)

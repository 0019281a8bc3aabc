// For tests of the pool registry.
#pragma once

#include <string>

#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {

class RegistryTest : public PoolTest {
 protected:
  void ExpectRefused(const PoolSchema& schema, absl::StatusCode code, const std::string& reason) {
    auto handle = registry_->Register(kMe, "bad", schema, 0);
    ASSERT_FALSE(handle.ok()) << reason;
    EXPECT_EQ(handle.status().code(), code) << handle.status();
    EXPECT_EQ(ReasonOf(handle.status()), reason) << handle.status();
    // Nothing is left of it, and the next one is served.
    EXPECT_TRUE(registry_->List().empty());
    auto next = registry_->Register(kMe, "next", MakeSchema("lpbthd"), 0);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_TRUE(Source(next->pool_id, Blocks({{0, 1}}), 1)->Health().ok());
    Unregister(next->pool_id);
  }
  void Unregister(const std::string& pool) {
    registry_->Unregister(kMe, pool, kEpoch, 0, [](const absl::Status&) {});
    EXPECT_TRUE(registry_->List().empty());
  }
  static PoolSchema Over(SegmentSpec::Kind kind, const std::string& name) {
    PoolSchema schema = MakeSchema("lpbthd");  // two pages
    schema.segments[0].kind = kind;
    schema.segments[0].name = name;
    return schema;
  }
};

}  // namespace spectrumkv

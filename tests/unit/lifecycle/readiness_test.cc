#include "server/lifecycle/readiness.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace spectrumkv {
namespace {

class ReadinessTest : public testing::Test {
 protected:
  std::vector<bool> told_;
  Readiness readiness_{[this](bool ready) { told_.push_back(ready); }};
};

TEST_F(ReadinessTest, ReadyFromItsBeginToItsEnd) {
  EXPECT_FALSE(readiness_.ready());
  readiness_.Announce();
  readiness_.Begin();
  EXPECT_TRUE(readiness_.ready());
  readiness_.End();
  EXPECT_FALSE(readiness_.ready());
  EXPECT_EQ(told_, (std::vector<bool>{false, true, false}));
}

TEST_F(ReadinessTest, AnEndBeforeTheBeginIsFinal) {
  readiness_.End();
  readiness_.Begin();
  readiness_.Announce();
  EXPECT_FALSE(readiness_.ready());
  EXPECT_EQ(told_, (std::vector<bool>{false, false})) << "a daemon that drains before it is ready would look ready for good";
}

TEST_F(ReadinessTest, OfTwoAtOnceTheEndWins) {
  for (int round = 0; round < 200; ++round) {
    std::vector<bool> told;
    Readiness readiness([&told](bool ready) { told.push_back(ready); });
    std::thread begins([&] { readiness.Begin(); });
    readiness.End();
    begins.join();
    ASSERT_FALSE(readiness.ready());
    ASSERT_FALSE(told.back());
  }
}

}  // namespace
}  // namespace spectrumkv

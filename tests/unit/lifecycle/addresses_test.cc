#include "server/lifecycle/addresses.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

TEST(WithPort, ReplacesThePort) {
  EXPECT_EQ(WithPort("127.0.0.1:0", 7), "127.0.0.1:7");
  EXPECT_EQ(WithPort("[::1]:0", 80), "[::1]:80");
}

TEST(WriteReadyFile, IsOneJsonObject) {
  char folder[] = "/tmp/skvready.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/ready.json";
  DaemonAddresses addresses;
  addresses.worker_socket = "/a \"quoted\\path\".sock";
  addresses.peer = "127.0.0.1:1";
  ASSERT_TRUE(WriteReadyFile(path, addresses, 18446744073709551615u).ok());
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(),
            "{\"worker_socket\": \"/a \\\"quoted\\\\path\\\".sock\", \"admin_socket\": \"\", \"worker_tcp\": \"\", "
            "\"peer\": \"127.0.0.1:1\", \"health\": \"\", \"metrics\": \"\", \"epoch\": \"18446744073709551615\", "
            "\"pid\": " +
                std::to_string(getpid()) + "}\n");
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  EXPECT_EQ(ReasonOf(WriteReadyFile(std::string(folder) + "/none/ready.json", addresses, 1)), "READY_FILE");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace spectrumkv

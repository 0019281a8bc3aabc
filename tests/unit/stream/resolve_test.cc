// A resolver that hangs costs its time and no more. The system's is wrapped when this is linked (--wrap=getaddrinfo).
#include "server/stream/resolve.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "server/stream/tls_probe.h"

namespace spectrumkv {
namespace {

// The resolver: "hangs.test" is answered once it is let go, "known.test" at once; it counts its questions for names.
struct Resolver {
  std::mutex mutex;
  std::condition_variable changed;
  bool hangs = true;
  int names = 0, hanging = 0;

  int Asked() {
    const std::lock_guard<std::mutex> lock(mutex);
    return names;
  }
  void Release() {
    std::unique_lock<std::mutex> lock(mutex);
    hangs = false;
    changed.notify_all();
    changed.wait(lock, [this] { return hanging == 0; });
  }
};

Resolver& TheResolver() {
  static auto* const resolver = new Resolver;
  return *resolver;
}

class ResolveTest : public testing::Test {
 protected:
  ~ResolveTest() override { TheResolver().Release(); }
  ResolveTest() {
    TheResolver().hangs = true;
    TheResolver().names = 0;
  }
  static std::string First(const std::vector<Place>& places) {
    if (places.empty() || places[0].address.ss_family != AF_INET) return "";
    const auto* place = reinterpret_cast<const sockaddr_in*>(&places[0].address);
    char text[INET_ADDRSTRLEN] = {};
    inet_ntop(AF_INET, &place->sin_addr, text, sizeof(text));
    return std::string(text) + ":" + std::to_string(ntohs(place->sin_port));
  }
};

TEST_F(ResolveTest, AddressesNeedNoResolver) {
  EXPECT_EQ(First(Resolve("127.0.0.1", "80", 0)), "127.0.0.1:80");
  EXPECT_EQ(Resolve("::1", "80", 0).size(), 1u);
  EXPECT_EQ(TheResolver().Asked(), 0);
}

TEST_F(ResolveTest, NamesAreAskedFor) {
  EXPECT_EQ(First(Resolve("known.test", "7420", 10'000)), "192.0.2.1:7420");
  EXPECT_TRUE(Resolve("nobody.test", "7420", 10'000).empty());
  EXPECT_EQ(TheResolver().Asked(), 2);
}

TEST_F(ResolveTest, AResolverThatHangsCostsItsTimeAndNoMore) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Resolve("hangs.test", "1", 100).empty());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(TheResolver().Asked(), 4);
  EXPECT_TRUE(Resolve("known.test", "1", 10'000).empty()) << "all threads hang, and no fifth is made";
  EXPECT_EQ(First(Resolve("127.0.0.1", "80", 0)), "127.0.0.1:80") << "addresses need none";
  EXPECT_EQ(TheResolver().Asked(), 4);
  TheResolver().Release();
  // A thread gives its place up a moment after it has its answer.
  std::string found;
  for (int i = 0; i < 1000 && found.empty(); ++i) {
    found = First(Resolve("known.test", "1", 10'000));
    if (found.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(found, "192.0.2.1:1");
}

TEST_F(ResolveTest, AProbeIsBoundedWithIt) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(SpeaksTls("hangs.test:7420", 200));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(TheResolver().Asked(), 1);
}

}  // namespace
}  // namespace spectrumkv

// What --wrap makes of the call. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

int __real_getaddrinfo(const char* host, const char* port, const addrinfo* hints, addrinfo** found);

int __wrap_getaddrinfo(const char* host, const char* port, const addrinfo* hints, addrinfo** found) {
  if ((hints->ai_flags & AI_NUMERICHOST) != 0) return __real_getaddrinfo(host, port, hints, found);
  spectrumkv::Resolver& resolver = spectrumkv::TheResolver();
  {
    std::unique_lock<std::mutex> lock(resolver.mutex);
    ++resolver.names;
    if (std::strcmp(host, "hangs.test") == 0) {
      ++resolver.hanging;
      resolver.changed.wait(lock, [&] { return !resolver.hangs; });
      --resolver.hanging;
      resolver.changed.notify_all();
    }
  }
  if (std::strcmp(host, "nobody.test") == 0) return EAI_NONAME;
  addrinfo numeric = *hints;
  numeric.ai_flags |= AI_NUMERICHOST;
  return __real_getaddrinfo("192.0.2.1", port, &numeric, found);
}

}  // NOLINTEND(bugprone-reserved-identifier)

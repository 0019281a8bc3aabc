#include "server/stream/resolve.h"

#include <netdb.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace spectrumkv {
namespace {

constexpr int kMaxThreads = 4;
std::atomic<int> g_threads{0};

std::vector<Place> Ask(const std::string& host, const std::string& port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  std::vector<Place> places;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Place place;
    if (one->ai_addrlen > sizeof(place.address)) continue;
    std::memcpy(&place.address, one->ai_addr, one->ai_addrlen);
    place.address_bytes = one->ai_addrlen;
    places.push_back(place);
  }
  freeaddrinfo(found);
  return places;
}

// Of one question: the thread may outlive who asked.
struct Question {
  std::mutex mutex;
  std::condition_variable changed;
  bool answered = false;
  std::vector<Place> places;
};

}  // namespace

std::vector<Place> Resolve(const std::string& host, const std::string& port, int64_t timeout_ms) {
  if (std::vector<Place> places = Ask(host, port, AI_NUMERICHOST); !places.empty()) return places;
  if (g_threads.fetch_add(1) >= kMaxThreads) {
    g_threads.fetch_sub(1);
    return {};
  }
  const auto question = std::make_shared<Question>();
  try {
    std::thread([question, host, port] {
      std::vector<Place> places = Ask(host, port, 0);
      g_threads.fetch_sub(1);
      std::lock_guard<std::mutex> lock(question->mutex);
      question->places = std::move(places);
      question->answered = true;
      question->changed.notify_all();
    }).detach();
  } catch (const std::system_error&) {  // no thread to be had
    g_threads.fetch_sub(1);
    return {};
  }
  std::unique_lock<std::mutex> lock(question->mutex);
  question->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return question->answered; });
  return std::move(question->places);
}

}  // namespace spectrumkv

#include "server/lifecycle/addresses.h"

#include <unistd.h>

#include <cstdio>
#include <initializer_list>
#include <system_error>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

absl::Status Failed(const std::string& path, const char* what) {
  return MakeError(absl::StatusCode::kUnavailable, "READY_FILE",
                   std::string(what) + " " + path + ": " + std::generic_category().message(errno), {{"path", path}});
}

}  // namespace

absl::Status WriteReadyFile(const std::string& path, const DaemonAddresses& addresses, uint64_t epoch) {
  std::string json = "{";
  const std::initializer_list<std::pair<const char*, std::string>> members = {
      {"worker_socket", addresses.worker_socket},
      {"admin_socket", addresses.admin_socket},
      {"worker_tcp", addresses.worker_tcp},
      {"peer", addresses.peer},
      {"health", addresses.health},
      {"metrics", addresses.metrics},
      {"epoch", std::to_string(epoch)}};
  for (const auto& [name, value] : members) json += "\"" + std::string(name) + "\": " + JsonText(value) + ", ";
  json += "\"pid\": " + std::to_string(getpid()) + "}\n";

  const std::string temporary = path + ".tmp";
  FILE* file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr) return Failed(temporary, "cannot create");
  const bool written = std::fwrite(json.data(), 1, json.size(), file) == json.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) return Failed(temporary, "cannot write");
  if (std::rename(temporary.c_str(), path.c_str()) != 0) return Failed(path, "cannot create");
  return absl::OkStatus();
}

std::string SelfAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string host = address.substr(0, colon);
  if (host == "0.0.0.0" || host.empty()) return "127.0.0.1" + address.substr(colon);
  return host == "[::]" ? "[::1]" + address.substr(colon) : address;
}

std::string WithPort(const std::string& address, int port) {
  return address.substr(0, address.rfind(':')) + ":" + std::to_string(port);
}

}  // namespace spectrumkv

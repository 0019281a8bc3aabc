// segments sweep: what killed workers left in shared memory. Needs no daemon, only the user whose segments they are.
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "client/cpp/shared_memory.h"
#include "client/ctl/command.h"

namespace spectrumkv::ctl {
namespace {

absl::StatusOr<int> Sweep(const Context& context, Args args) {
  const std::string directory = args.Text("directory", "/dev/shm");
  const std::string prefix = args.Text("prefix", client::kStalePrefix);
  const bool dry_run = args.Switch("dry-run");
  if (prefix.empty()) args.Refuse("--prefix must not be empty: other programs' files lie there, too");
  std::error_code unlisted;
  std::filesystem::directory_iterator(directory, unlisted);
  if (unlisted) args.Refuse("--directory " + directory + " cannot be listed: " + unlisted.message());
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const std::vector<std::string> names = client::SweepStaleSegments(directory, prefix, !dry_run);
  std::string json = "{\"segments\": [";
  for (const std::string& name : names) {
    if (!context.json) std::printf("%s\n", name.c_str());
    if (&name != &names.front()) json += ", ";
    json += '"';
    for (const char c : name) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned char>(c));
      const bool plain = c >= ' ' && c < 0x7f && c != '"' && c != '\\';
      json += plain ? std::string(1, c) : escape;
    }
    json += '"';
  }
  if (context.json) std::printf("%s]}\n", json.c_str());
  return kOk;
}

}  // namespace

std::vector<Command> SegmentCommands() {
  return {{"segments sweep",
           "",
           "remove shared memory that killed workers of this user left behind, and name it",
           {{"directory", "PATH", "where; default /dev/shm"},
            {"prefix", "TEXT",
             "of the names; only what client libraries of SpectrumKV made: others do not lock their files; default " +
                 std::string(client::kStalePrefix)},
            {"dry-run", "", "only name it"}},
           &Sweep}};
}

}  // namespace spectrumkv::ctl

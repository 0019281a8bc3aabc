// profile: measures a model from captured KV and writes the daemon's file. Runs in this program, without a daemon.
#include <cstdio>

#include "client/ctl/codec.h"
#include "client/ctl/profile.h"

namespace spectrumkv::ctl {
namespace {

absl::Status ReadInto(const std::string& path, Array* array) {
  const absl::StatusOr<std::string> file = ReadFile(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Array> parsed = ParseNpy(*file);
  if (!parsed.ok()) return parsed.status();
  *array = *std::move(parsed);
  return absl::OkStatus();
}

absl::StatusOr<int> Profile(const Context&, Args args) {
  ProfileOptions options;
  options.model = args.Needed("model");
  options.revision = args.Text("revision");
  options.sinks = static_cast<uint32_t>(args.Number("sinks", 4, 0, 65536));
  options.layer_weights = args.Switch("layer-weights");
  const std::vector<std::string> queries = args.List("queries");
  std::vector<std::string> files;
  for (size_t i = 0; i == 0 || i < args.positional_count(); ++i) files.push_back(args.Positional(i, "KV.npy"));
  if (const absl::Status status = args.Check(args.positional_count()); !status.ok()) return status;
  if (!queries.empty() && queries.size() != files.size()) {
    return UsageError("--queries names " + std::to_string(queries.size()) + " files for " + std::to_string(files.size()) +
                      " of KV");
  }
  if (options.layer_weights && queries.empty()) return UsageError("--layer-weights needs --queries");
  std::vector<Capture> captures(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    if (absl::Status status = ReadInto(files[i], &captures[i].kv); !status.ok()) return status;
    if (queries.empty()) continue;
    if (absl::Status status = ReadInto(queries[i], &captures[i].queries); !status.ok()) return status;
  }
  std::string error;
  const Backend* backend = Backends().Choose("auto", &error);
  if (backend == nullptr) return UsageError(error);
  const absl::StatusOr<Findings> findings = MeasureProfile(*backend, captures, options);
  if (!findings.ok()) return findings.status();
  const std::string yaml = ProfileYaml(*findings, options);
  const std::string output = args.Text("output");
  if (output.empty()) {
    std::fputs(yaml.c_str(), stdout);
    return kOk;
  }
  if (absl::Status status = WriteFile(output, yaml); !status.ok()) return status;
  std::printf("%s: %llu tokens of %u layers%s\n", output.c_str(), static_cast<unsigned long long>(findings->tokens),
              findings->layers, findings->queries ? "" : "; without queries the weight of keys stays the default");
  return kOk;
}

}  // namespace

std::vector<Command> ProfileCommands() {
  return {{"profile",
           "KV.npy...",
           "measure a model from captured KV, [layers, 2, tokens, heads, head_dim], for the daemon's policy.profile_dir",
           {{"model", "NAME", "as pools of the model name it"},
            {"revision", "NAME", "the same; default any"},
            {"queries", "LIST",
             "one .npy for each KV file, [layers, positions, query_heads, head_dim] of its last positions: K against V, and "
             "layers against each other"},
            {"sinks", "N", "tokens at the front that will be raw; default 4"},
            {"layer-weights", "", "weigh layers by their sensitivity; helps at budgets below 0.15 only"},
            {"output", "FILE", "write there instead of to stdout"}},
           Profile}};
}

}  // namespace spectrumkv::ctl

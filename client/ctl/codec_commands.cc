// codec list, codec selftest; codec check and codec bench have files of their own.
#include <cstdio>

#include "client/ctl/codec.h"
#include "client/ctl/output.h"
#include "kernels/cpu/cpu_backends.h"

namespace spectrumkv::ctl {
namespace {

// Prints rows of {backend, supported, passed, detail} as the daemon's answer has them.
int PrintResults(const Context& context, const v1::RunSelfTestResponse& results, bool tested) {
  bool passed = true;
  std::vector<std::vector<std::string>> rows = {{"BACKEND", "SUPPORTED", tested ? "SELF-TEST" : "", ""}};
  for (const v1::SelfTestResult& result : results.results()) {
    passed = passed && (result.passed() || !result.supported());
    const std::string outcome = !tested || !result.supported() ? "" : result.passed() ? "passed" : "FAILED";
    rows.push_back({result.backend(), result.supported() ? "yes" : "no", outcome, result.detail()});
  }
  std::fputs(context.json ? ToJson(results).c_str() : Table(rows).c_str(), stdout);
  return passed || !tested ? kOk : kCheckFailed;
}

absl::StatusOr<int> List(const Context& context, Args args) {
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  std::string error;
  const Backend* best = Backends().Choose("auto", &error);
  v1::RunSelfTestResponse results;
  for (const Backend* backend : Backends().all()) {
    v1::SelfTestResult* result = results.add_results();
    result->set_backend(backend->name());
    result->set_supported(backend->supported());
    result->set_detail(backend == best ? "chosen by auto" : "");
  }
  return PrintResults(context, results, false);
}

absl::StatusOr<int> RunSelfTests(const Context& context, Args args) {
  const bool daemon = args.Switch("daemon");
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  if (daemon) {
    const auto results = CallAdmin(context.connection, &AdminStub::RunSelfTest, v1::RunSelfTestRequest());
    if (!results.ok()) return results.status();
    return PrintResults(context, *results, true);
  }
  v1::RunSelfTestResponse results;
  for (const Backend* backend : Backends().all()) {
    v1::SelfTestResult* result = results.add_results();
    result->set_backend(backend->name());
    result->set_supported(backend->supported());
    std::string detail = "this machine cannot run it";
    if (backend->supported()) {
      detail.clear();
      result->set_passed(SelfTest(*backend, &detail));
    }
    result->set_detail(detail);
  }
  return PrintResults(context, results, true);
}

}  // namespace

const BackendRegistry& Backends() {
  static const BackendRegistry registry = [] {
    BackendRegistry backends;
    AddCpuBackends(&backends);
    return backends;
  }();
  return registry;
}

absl::StatusOr<std::vector<const Backend*>> ChooseBackends(const std::string& name) {
  std::vector<const Backend*> chosen;
  for (const Backend* backend : Backends().all()) {
    if (name.empty() ? backend->supported() : backend->name() == name) chosen.push_back(backend);
  }
  if (chosen.empty()) return UsageError("there is no backend \"" + name + "\"; see spectrumkvctl codec list");
  if (!chosen[0]->supported()) return UsageError("this machine cannot run the backend " + name);
  return chosen;
}

std::vector<Command> CodecCommands() {
  const Flag backend = {"backend", "NAME", "scalar, avx2 or avx512; default all this machine can run"};
  return {
      {"codec list", "", "codec backends of this program", {}, List},
      {"codec selftest",
       "",
       "code and decode known chunks on every backend",
       {{"daemon", "", "ask the daemon to test its own"}},
       RunSelfTests},
      {"codec check",
       "DIR",
       "run every vector of a folder, both ways; exit 1 on any difference",
       {backend},
       CodecCheck},
      {"codec bench",
       "",
       "GB/s of raw KV, one core, by backend and tier",
       {backend,
        {"seconds", "N", "of each measurement; default 0.2"},
        {"head-dim", "N", "default 128"},
        {"heads", "N", "default 8"}},
       CodecBench},
  };
}

}  // namespace spectrumkv::ctl

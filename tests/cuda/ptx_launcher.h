// A Launcher of kernels/cuda/pipeline.cuh that interprets PTX. Include the shim and the kernels first: a kernel
// compiled as C++ is there for its name alone, as nvcc and the C++ compiler mangle alike. Link with exported symbols.
#pragma once

#include <dlfcn.h>

#include "tests/cuda/ptx/machine.h"
#include "tests/cuda/ptx/parser.h"

namespace spectrumkv::testing {

class PtxLauncher {
 public:
  // What is counted is added to *counters (may be null) in the end.
  PtxLauncher(const ptx::Module* module, shim::Options options, ptx::Counters* counters)
      : module_(module), machine_(std::move(options)), counters_(counters) {}
  ~PtxLauncher() {
    if (counters_ == nullptr) return;
    counters_->instructions += machine_.counters().instructions;
    counters_->global_read_bytes += machine_.counters().global_read_bytes;
    counters_->global_written_bytes += machine_.counters().global_written_bytes;
  }

  template <typename Args>
  void operator()(void (*kernel)(const Args), uint32_t blocks, uint32_t threads, const Args& args,
                  uint32_t rows = 1) {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(kernel), &info) == 0 || info.dli_sname == nullptr) {
      throw ptx::Fault("a kernel without a name: is the program linked with its symbols exported?");
    }
    machine_.Launch(module_->Find(info.dli_sname), blocks, threads, &args, sizeof(args), rows);
  }

 private:
  const ptx::Module* module_;
  ptx::Machine machine_;
  ptx::Counters* counters_;
};

}  // namespace spectrumkv::testing

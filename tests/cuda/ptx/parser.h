// Reads the PTX text that nvcc writes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/cuda/ptx/instruction.h"

namespace spectrumkv::ptx {

class Module {
 public:
  // Throws Fault on text it cannot make sense of. An instruction it does not know is kept as kRefused, and refused when
  // a thread comes to it; so are .approx, .ftz and .full, whose results are not reproducible, and float additions and
  // multiplications without .rn, which ptxas may contract.
  explicit Module(const std::string& text);
  static Module Load(const std::string& path);

  // By mangled name. Throws Fault.
  const Kernel& Find(const std::string& name) const;
  const std::map<std::string, Kernel>& kernels() const { return kernels_; }
  // Every instruction that would be refused.
  std::vector<std::string> Refused() const;

 private:
  std::map<std::string, Kernel> kernels_;
};

}  // namespace spectrumkv::ptx

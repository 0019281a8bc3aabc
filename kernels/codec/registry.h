// The backends compiled into this program, best first, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "kernels/codec/backend.h"

namespace spectrumkv {

// Holds borrowed, immortal backends. Filled once at start (AddCpuBackends in kernels/cpu/cpu_backends.h), then const.
class BackendRegistry {
 public:
  // The last added is preferred.
  void Add(const Backend* backend);
  // All, best first.
  const std::vector<const Backend*>& all() const { return backends_; }
  // Null if there is none of that name.
  const Backend* Find(const std::string& name) const;
  // The best this machine supports, or the named one ("auto" or "": best). Null, with words in `error`, if the name is
  // unknown or the machine cannot run it.
  const Backend* Choose(const std::string& name, std::string* error) const;

 private:
  std::vector<const Backend*> backends_;
};

// Encodes and decodes embedded golden chunks of every tier; false with what differs in `detail`.
bool SelfTest(const Backend& backend, std::string* detail);

}  // namespace spectrumkv

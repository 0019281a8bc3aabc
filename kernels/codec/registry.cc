#include "kernels/codec/registry.h"

namespace spectrumkv {

void BackendRegistry::Add(const Backend* backend) { backends_.insert(backends_.begin(), backend); }

const Backend* BackendRegistry::Find(const std::string& name) const {
  for (const Backend* backend : backends_) {
    if (name == backend->name()) return backend;
  }
  return nullptr;
}

const Backend* BackendRegistry::Choose(const std::string& name, std::string* error) const {
  if (name.empty() || name == "auto") {
    for (const Backend* backend : backends_) {
      if (backend->supported()) return backend;
    }
    *error = "no codec backend runs on this machine";
    return nullptr;
  }
  const Backend* backend = Find(name);
  if (backend == nullptr) {
    *error = "unknown codec backend '" + name + "'; known:";
    for (const Backend* known : backends_) *error += std::string(" ") + known->name();
    return nullptr;
  }
  if (!backend->supported()) {
    *error = "this machine cannot run codec backend '" + name + "'";
    return nullptr;
  }
  return backend;
}

}  // namespace spectrumkv

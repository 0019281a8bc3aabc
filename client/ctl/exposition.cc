#include "client/ctl/exposition.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace spectrumkv::ctl {
namespace {

// `{name="value",...}` from `at`, which is left behind the brace. False where it is none.
bool ParseLabels(const std::string& line, size_t* at, Exposition::Labels* labels) {
  ++*at;
  while (*at < line.size() && line[*at] != '}') {
    const size_t equals = line.find("=\"", *at);
    if (equals == std::string::npos) return false;
    std::string& value = (*labels)[line.substr(*at, equals - *at)];
    size_t i = equals + 2;
    for (; i < line.size() && line[i] != '"'; ++i) {
      if (line[i] == '\\' && i + 1 < line.size()) ++i;
      value += line[i];
    }
    if (i >= line.size()) return false;
    *at = i + 1;
    if (*at < line.size() && line[*at] == ',') ++*at;
  }
  return (*at)++ < line.size();
}

bool Fits(const Exposition::Labels& wanted, const Exposition::Labels& labels) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& one) {
    const auto found = labels.find(one.first);
    return found != labels.end() && found->second == one.second;
  });
}

}  // namespace

Exposition Exposition::Parse(const std::string& text) {
  Exposition all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    size_t at = std::min(line.find('{'), line.find(' '));
    if (at == std::string::npos || at == 0) continue;
    const std::string name = line.substr(0, at);
    Sample sample;
    if (line[at] == '{' && !ParseLabels(line, &at, &sample.labels)) continue;
    char* end = nullptr;
    sample.value = std::strtod(line.c_str() + at, &end);
    if (end == line.c_str() + at) continue;
    all.samples_[name].push_back(std::move(sample));
  }
  return all;
}

double Exposition::Sum(const std::string& name, const Labels& labels) const {
  const auto sums = SumBy(name, {}, labels);
  return sums.empty() ? 0 : sums.begin()->second;
}

std::map<std::string, double> Exposition::SumBy(const std::string& name, const std::vector<std::string>& by,
                                                const Labels& labels) const {
  std::map<std::string, double> sums;
  const auto found = samples_.find(name);
  if (found == samples_.end()) return sums;
  for (const Sample& sample : found->second) {
    if (!Fits(labels, sample.labels)) continue;
    std::string key;
    for (const std::string& label : by) {
      const auto value = sample.labels.find(label);
      key += (key.empty() ? "" : " ") + (value == sample.labels.end() ? std::string() : value->second);
    }
    sums[key] += sample.value;
  }
  return sums;
}

}  // namespace spectrumkv::ctl

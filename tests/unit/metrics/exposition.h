// Reads the text exposition: "name{labels}" -> value.
#pragma once

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

namespace spectrumkv {

inline std::map<std::string, double> ParseExposition(const std::string& text) {
  std::map<std::string, double> series;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    series[line.substr(0, space)] = std::strtod(line.c_str() + space + 1, nullptr);
  }
  return series;
}

}  // namespace spectrumkv

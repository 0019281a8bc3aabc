#include "tests/bench/bench_util.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace spectrumkv::bench {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Summary Summarize(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {Percentile(values, 0.5), values.front(), values.back()};
}

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::min(values.size(), std::max<size_t>(1, rank)) - 1];
}

double ProcessCpuSeconds(pid_t pid) {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

uint64_t ProcessOwnBytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::strtoull(line.c_str() + 8, nullptr, 10) << 10;
  }
  return 0;
}

std::vector<std::string> SplitCommas(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    if (end > begin) parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool Flags::Set(const Flag& flag, const std::string& value) {
  if (auto* text = std::get_if<std::string*>(&flag.out)) {
    **text = value;
  } else if (auto* list = std::get_if<std::vector<std::string>*>(&flag.out)) {
    for (const std::string& part : SplitCommas(value)) (*list)->push_back(part);
  } else if (auto* number = std::get_if<uint32_t*>(&flag.out)) {
    char* end = nullptr;
    const unsigned long long parsed = std::strtoull(value.c_str(), &end, 10);
    if (value.empty() || *end != 0 || value[0] == '-' || parsed < flag.min || parsed > flag.max) {
      std::fprintf(stderr, "%s is '%s'; wanted a number from %u to %u\n", flag.name.c_str(), value.c_str(), flag.min, flag.max);
      return false;
    }
    **number = static_cast<uint32_t>(parsed);
  }
  return true;
}

bool Flags::Parse(int argc, char** argv) const {
  for (int i = 0; i < argc; ++i) {
    const std::string name = argv[i];
    const auto flag = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.name == name; });
    if (flag == flags_.end()) {
      std::fprintf(stderr, "unknown option '%s'\n%s", name.c_str(), usage_.c_str());
      return false;
    }
    if (auto* on = std::get_if<bool*>(&flag->out)) {
      **on = true;
    } else if (i + 1 == argc) {
      std::fprintf(stderr, "%s needs a value\n%s", name.c_str(), usage_.c_str());
      return false;
    } else if (!Set(*flag, argv[++i])) {
      return false;
    }
  }
  return true;
}

JsonRow& JsonRow::Raw(const std::string& name, const std::string& text) {
  text_ += (text_.empty() ? "\"" : ", \"") + name + "\": " + text;
  return *this;
}

JsonRow& JsonRow::Add(const char* name, const std::string& value) { return Raw(name, "\"" + value + "\""); }

JsonRow& JsonRow::Add(const char* name, double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return Raw(name, text);
}

JsonRow& JsonRow::Add(const char* name, uint64_t value) { return Raw(name, std::to_string(value)); }

JsonRow& JsonRow::Add(const char* name, bool value) { return Raw(name, value ? "true" : "false"); }

JsonRow& JsonRow::Add(const std::string& name, const Summary& value) {
  return Add((name + "_median").c_str(), value.median)
      .Add((name + "_min").c_str(), value.min)
      .Add((name + "_max").c_str(), value.max);
}

void JsonRow::Print() const {
  std::printf("{%s}\n", text_.c_str());
  std::fflush(stdout);
}

}  // namespace spectrumkv::bench

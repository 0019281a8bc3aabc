// What the benchmarks share: the clock, summaries of repeated runs, figures of other processes, flags, JSON rows.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace spectrumkv::bench {

// Seconds of the monotonic clock.
double Now();

// Of at least one value.
struct Summary {
  double median = 0, min = 0, max = 0;
};
Summary Summarize(std::vector<double> values);
// The value that `share` (0 to 1) of the values do not exceed.
double Percentile(std::vector<double> values, double share);

// CPU seconds of a process, threads that have ended included; of this process for getpid(). 0 where there is none.
double ProcessCpuSeconds(pid_t pid);
// Resident memory of a process that is its own: without pages of files and of shared memory.
uint64_t ProcessOwnBytes(pid_t pid);

// `--name value` and `--name` alone for booleans. Values are checked against the limits given.
class Flags {
 public:
  explicit Flags(std::string usage) : usage_(std::move(usage)) {}
  void Add(const char* name, bool* out) { flags_.push_back({name, out, 0, 0}); }
  void Add(const char* name, std::string* out) { flags_.push_back({name, out, 0, 0}); }
  // Comma-separated; given again, it goes on with the list.
  void Add(const char* name, std::vector<std::string>* out) { flags_.push_back({name, out, 0, 0}); }
  void Add(const char* name, uint32_t* out, uint32_t min, uint32_t max) { flags_.push_back({name, out, min, max}); }
  // False after words on stderr: which flag, which value, which limits.
  bool Parse(int argc, char** argv) const;

 private:
  struct Flag {
    std::string name;
    std::variant<bool*, std::string*, std::vector<std::string>*, uint32_t*> out;
    uint32_t min, max;
  };
  static bool Set(const Flag& flag, const std::string& value);
  std::string usage_;
  std::vector<Flag> flags_;
};

std::vector<std::string> SplitCommas(const std::string& list);

// One flat JSON object on a line of stdout. Names and values hold no quotes.
class JsonRow {
 public:
  JsonRow& Add(const char* name, const std::string& value);
  JsonRow& Add(const char* name, const char* value) { return Add(name, std::string(value)); }
  JsonRow& Add(const char* name, double value);
  JsonRow& Add(const char* name, uint64_t value);
  JsonRow& Add(const char* name, uint32_t value) { return Add(name, uint64_t{value}); }
  JsonRow& Add(const char* name, bool value);
  // NAME_median, NAME_min, NAME_max.
  JsonRow& Add(const std::string& name, const Summary& value);
  void Print() const;

 private:
  JsonRow& Raw(const std::string& name, const std::string& text);
  std::string text_;
};

}  // namespace spectrumkv::bench

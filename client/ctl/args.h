// Arguments of one command, checked against its table of flags.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "spectrumkv/v1/schema.pb.h"

namespace spectrumkv::ctl {

struct Flag {
  std::string name;   // without "--"
  std::string value;  // what it takes, "N"; empty for a switch
  std::string help;
};

// An error of the caller: InvalidArgument with reason USAGE, exit code 2.
absl::Status UsageError(const std::string& message);

// What was given. The typed readers remember the first error; commands read all they need, then return Check().
class Args {
 public:
  // --flag value, --flag=value, switches, positional arguments in any order; "--" ends flags.
  static absl::StatusOr<Args> Parse(const std::vector<std::string>& words, const std::vector<Flag>& flags);

  bool Has(const std::string& name) const { return values_.count(name) != 0; }
  bool Switch(const std::string& name) const { return Has(name); }
  std::string Text(const std::string& name, const std::string& otherwise = "") const;
  // The value, which must be given.
  std::string Needed(const std::string& name);
  uint64_t Number(const std::string& name, uint64_t otherwise, uint64_t low, uint64_t high);
  double Real(const std::string& name, double otherwise);
  // Seconds, with fractions, as milliseconds.
  int64_t Milliseconds(const std::string& name, int64_t otherwise);
  // "0-15,20,18": in the order given, none above `high`.
  std::vector<uint64_t> Ids(const std::string& name, uint64_t high = UINT64_MAX);
  std::vector<std::string> List(const std::string& name) const;
  // 2 hex digits a byte.
  std::string Hex(const std::string& name);
  v1::DataType DataType(const std::string& name, v1::DataType otherwise);

  // Positional argument i, which must be there.
  std::string Positional(size_t i, const std::string& what);
  size_t positional_count() const { return positional_.size(); }

  // The first error, also "unexpected argument" for positional ones beyond `positional_max`.
  absl::Status Check(size_t positional_max = 0) const;
  void Refuse(const std::string& message);

 private:
  std::map<std::string, std::string> values_;
  std::vector<std::string> positional_;
  absl::Status error_;
};

// Runs of ids, joined: "0-15,20". INVALID_ARGUMENT (USAGE) for anything else, or for more than 2^20 ids.
absl::StatusOr<std::vector<uint64_t>> ParseIds(const std::string& text);

}  // namespace spectrumkv::ctl

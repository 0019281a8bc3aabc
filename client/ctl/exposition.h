// The text format of /metrics, which AdminService.GetMetrics answers with.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace spectrumkv::ctl {

class Exposition {
 public:
  using Labels = std::map<std::string, std::string>;

  // Lines that are no samples are left out.
  static Exposition Parse(const std::string& text);

  // Of all samples of `name` that have these labels, whatever others they have; 0 where there is none.
  double Sum(const std::string& name, const Labels& labels = {}) const;
  // The same, apart by the values of `by`: several names are joined by spaces.
  std::map<std::string, double> SumBy(const std::string& name, const std::vector<std::string>& by,
                                      const Labels& labels = {}) const;
  bool Has(const std::string& name) const { return samples_.count(name) != 0; }

 private:
  struct Sample {
    Labels labels;
    double value = 0;
  };
  std::map<std::string, std::vector<Sample>> samples_;
};

}  // namespace spectrumkv::ctl

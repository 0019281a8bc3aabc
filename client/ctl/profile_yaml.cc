// How findings are written down: what the daemon reads, and a section `measured` for people.
#include <cstdarg>
#include <cstdio>

#include "client/ctl/profile.h"

namespace spectrumkv::ctl {
namespace {

__attribute__((format(printf, 2, 3))) void Append(std::string* text, const char* format, ...) {
  char line[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof(line), format, values);
  va_end(values);
  *text += line;
}

// A YAML text in single quotes.
std::string Quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') out += '\'';
    out += c;
  }
  return out + "'";
}

void AppendErrors(const char* name, const std::array<double, kTierCount>& errors, std::string* text) {
  Append(text, "%s: {", name);
  const char* comma = "";
  for (const Tier tier : {Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP8, Tier::kP4}) {
    if (!(errors[static_cast<size_t>(tier)] >= 1e-12)) continue;
    Append(text, "%s%s: %.4g", comma, TierName(tier), errors[static_cast<size_t>(tier)]);
    comma = ", ";
  }
  *text += "}\n";
}

template <typename ValueOf>
void AppendLayers(const char* name, size_t layers, const char* format, const ValueOf& value_of, std::string* text) {
  Append(text, "%s: [", name);
  for (size_t i = 0; i < layers; ++i) {
    if (i != 0) *text += i % 16 == 0 ? ",\n    " : ", ";
    char number[32];
    std::snprintf(number, sizeof(number), format, value_of(i));
    *text += number;
  }
  *text += "]\n";
}

}  // namespace

std::string ProfileYaml(const Findings& findings, const ProfileOptions& options) {
  std::string text = "# Written by spectrumkvctl profile; docs/allocators.md, \"Model profiles\".\n";
  text += "model: " + Quoted(options.model) + "\n";
  if (!options.revision.empty()) text += "revision: " + Quoted(options.revision) + "\n";
  if (findings.queries) {
    text += "# Of an error in K against one in V.\n";
    Append(&text, "k_weight: %.3g\n", findings.k_weight);
  }
  text += "# Relative squared error of each tier.\n";
  AppendErrors("k_errors", findings.k_errors, &text);
  AppendErrors("v_errors", findings.v_errors, &text);
  if (options.layer_weights && findings.queries) {
    AppendLayers("layer_weights", findings.layers, "%.3g", [&](size_t i) { return findings.layer_weights[i]; }, &text);
  }
  text += "\n# For people; the daemon does not read it.\nmeasured:\n";
  Append(&text, "  tokens: %llu\n  layers: %u\n  heads: %u\n  head_dim: %u\n",
         static_cast<unsigned long long>(findings.tokens), findings.layers, findings.heads, findings.head_dim);
  const auto list = [&](const char* comment, const char* name, double LayerFindings::*value) {
    Append(&text, "  # %s\n", comment);
    AppendLayers(name, findings.layers, "%.3g", [&](size_t i) { return findings.by_layer[i].*value; }, &text);
  };
  list("Largest key channel over the median one, around the centres, by layer; above 6 there are outliers.", "  outliers",
       &LayerFindings::outliers);
  list("The same without centres: what plain tiers meet.", "  outliers_uncentred", &LayerFindings::outliers_uncentred);
  if (!findings.queries) return text;
  list("Error of the attention output by K against that by V, for the same relative error.", "  k_to_v",
       &LayerFindings::k_to_v);
  AppendLayers("  sensitivity", findings.layers, "%.3g", [&](size_t i) { return findings.layer_weights[i]; }, &text);
  return text;
}

}  // namespace spectrumkv::ctl

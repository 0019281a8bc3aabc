// The fuzz target without a fuzzing engine: the corpus and the shipped file, each as it is and with seeded mutations.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace spectrumkv {
namespace {

const std::string kRoot = SPECTRUMKV_SOURCE_DIR;

void RunTarget(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::vector<std::string> Corpus() {
  std::vector<std::filesystem::path> paths = {kRoot + "/config/spectrumkvd.yaml"};
  for (const auto& entry : std::filesystem::directory_iterator(kRoot + "/tests/fuzz/config/corpus")) {
    paths.push_back(entry.path());
  }
  std::vector<std::string> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    inputs.push_back(text.str());
  }
  return inputs;
}

// One small edit: flip, remove, repeat, or insert what YAML and the values' grammars care about.
void Mutate(std::mt19937_64* random, std::string* input) {
  static const std::vector<std::string> kPieces = {"\n",          "  ",       ":",
                                                   ": ",          "- ",       "[",
                                                   "]",           "{",        "}",
                                                   ",",           "\"",       "'",
                                                   "#",           "&a ",      "*a",
                                                   "!!str ",      "|\n",      ">\n",
                                                   "? ",          "---\n",    "...\n",
                                                   "%YAML 1.2\n", "<<: ",     "~",
                                                   "\t",          "\r",       std::string(1, '\0'),
                                                   "\xff",        "\xc3\xa4", "18446744073709551616",
                                                   "-1",          "nan",      "1e999",
                                                   "0x1",         "TiB",      "ms",
                                                   "true",        "peer",     "streams",
                                                   "tiers",       "RAW"};
  const auto below = [random](size_t limit) { return static_cast<size_t>((*random)() % limit); };
  const size_t at = below(input->size() + 1);
  switch (below(4)) {
    case 0:
      if (at < input->size()) (*input)[at] = static_cast<char>((*random)());
      break;
    case 1: input->erase(at, below(20)); break;
    case 2: input->insert(at, input->substr(below(input->size() + 1), below(60))); break;
    default: input->insert(at, kPieces[below(kPieces.size())]); break;
  }
}

TEST(ConfigFuzzTest, TheCorpusAsItIs) {
  const auto inputs = Corpus();
  ASSERT_GT(inputs.size(), 5u);
  for (const std::string& input : inputs) RunTarget(input);
}

TEST(ConfigFuzzTest, TheCorpusMutated) {
  std::mt19937_64 random(20261129);
  for (const std::string& input : Corpus()) {
    for (int round = 0; round < 150; ++round) {
      std::string mutated = input;
      for (uint64_t edits = 1 + random() % 6; edits > 0; --edits) Mutate(&random, &mutated);
      RunTarget(mutated);
    }
  }
}

TEST(ConfigFuzzTest, EveryPrefixOfASmallFile) {
  const std::string text = "peer: {streams: 3, tls: {ca_file: \"/a\"}}\npolicy:\n  tiers: [RAW, Q4]\n  budget: 0.3\n";
  for (size_t size = 0; size <= text.size(); ++size) RunTarget(text.substr(0, size));
}

}  // namespace
}  // namespace spectrumkv

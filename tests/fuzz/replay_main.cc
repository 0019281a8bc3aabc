// Runs a fuzz target without a fuzzing engine: every file below the folders (or the files) given, as it is, then seeded
// mutations of them. --mutations N (0), --seed N, --suffix TEXT (only files so named). Prints what it ran; a fault ends the program.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

Bytes ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

void AddInputs(const std::filesystem::path& path, const std::string& suffix, std::vector<std::filesystem::path>* files) {
  if (std::filesystem::is_regular_file(path)) files->push_back(path);
  if (!std::filesystem::is_directory(path)) return;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file() && entry.path().string().ends_with(suffix)) files->push_back(entry.path());
  }
}

// One to four small changes: a bit, a byte, a cut, bytes added, a run copied, a header field.
Bytes Mutate(Bytes bytes, std::mt19937_64* rng) {
  const auto below = [rng](uint64_t n) { return static_cast<size_t>((*rng)() % n); };
  for (size_t change = 1 + below(4); change != 0; --change) {
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = below(3) == 0 ? below(std::min<size_t>(bytes.size(), 160)) : below(bytes.size());
    switch (below(6)) {
      case 0: bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << below(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>((*rng)()); break;
      case 2: bytes.resize(at); break;
      case 3: bytes.insert(bytes.end(), 1 + below(40), static_cast<uint8_t>((*rng)())); break;
      case 4: {
        const size_t length = std::min(1 + below(64), bytes.size() - at), from = below(bytes.size() - length + 1);
        std::memmove(bytes.data() + at, bytes.data() + from, length);
        break;
      }
      default: {
        constexpr uint8_t kEdges[] = {0x00, 0xFF, 0x7F, 0x80, 0x07, 0x70, 0xF8, 0x7C};
        bytes[at] = kEdges[below(sizeof(kEdges))];
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t mutations = 0, seed = 1;
  std::string suffix;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--mutations" && i + 1 < argc) {
      mutations = std::stoull(argv[++i]);
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else if (argument == "--suffix" && i + 1 < argc) {
      suffix = argv[++i];
    } else {
      AddInputs(argument, suffix, &files);
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "no input files\n");
    return 2;
  }
  std::sort(files.begin(), files.end());  // the same order on every machine
  std::vector<Bytes> inputs;
  for (const std::filesystem::path& file : files) {
    inputs.push_back(ReadFile(file));
    LLVMFuzzerTestOneInput(inputs.back().data(), inputs.back().size());
  }
  std::mt19937_64 rng(seed);
  for (uint64_t i = 0; i < mutations; ++i) {
    const Bytes input = Mutate(inputs[rng() % inputs.size()], &rng);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu files and %llu mutations (seed %llu): no fault\n", inputs.size(),
              static_cast<unsigned long long>(mutations), static_cast<unsigned long long>(seed));
  return 0;
}

// The file of verdicts, as text. Names are percent-coded, so that a line has exactly ten words.
#include <charconv>
#include <cstdio>
#include <set>
#include <sstream>

#include "kernels/format/crc32c.h"
#include "server/base/status.h"
#include "server/probe/verdicts.h"

namespace spectrumkv {
namespace {

constexpr char kTitle[] = "spectrumkv-verdicts 1";
constexpr uint32_t kMaxScore = 1000;
constexpr char kHex[] = "0123456789abcdef";

std::string Coded(const std::string& name) {
  std::string out = "=";  // a word also where the name is empty
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte > 0x20 && byte < 0x7f && c != '%') {
      out += c;
    } else {
      out += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

std::optional<std::string> Decoded(const std::string& word) {
  if (word.empty() || word[0] != '=') return std::nullopt;
  std::string out;
  for (size_t i = 1; i < word.size(); ++i) {
    if (word[i] != '%') {
      out += word[i];
      continue;
    }
    unsigned value = 0;
    if (i + 2 >= word.size()) return std::nullopt;
    const auto end = std::from_chars(&word[i + 1], &word[i + 1] + 2, value, 16);
    if (end.ptr != &word[i + 1] + 2 || end.ec != std::errc()) return std::nullopt;
    out += static_cast<char>(value);
    i += 2;
  }
  if (out.size() > kMaxVerdictNameBytes || Coded(out) != word) return std::nullopt;
  return out;
}

template <typename Number>
bool Parsed(const std::string& word, Number least, Number most, Number* out) {
  const auto end = std::from_chars(word.data(), word.data() + word.size(), *out);
  return end.ec == std::errc() && end.ptr == word.data() + word.size() && *out >= least && *out <= most;
}

std::string LineOf(const Verdict& verdict) {
  std::string line = Coded(verdict.key.owner) + " " + Coded(verdict.key.model) + " " + Coded(verdict.key.revision) +
                     " " + std::to_string(verdict.key.codec_version) + " " + TierName(verdict.key.tier) + " " +
                     (verdict.open ? "open" : "closed") + " " + std::to_string(verdict.unix_seconds);
  for (const Score& score : verdict.scores)
    line += " " + std::to_string(score.passed) + "/" + std::to_string(score.trials);
  return line + "\n";
}

bool ParseScore(const std::string& word, Score* score) {
  const size_t slash = word.find('/');
  return slash != std::string::npos && Parsed(word.substr(slash + 1), 0u, kMaxScore, &score->trials) &&
         Parsed(word.substr(0, slash), 0u, score->trials, &score->passed);
}

std::optional<Tier> TierOf(const std::string& name) {
  for (int id = 0; id < kTierCount; ++id) {
    if (name == TierName(static_cast<Tier>(id))) return static_cast<Tier>(id);
  }
  return std::nullopt;
}

std::optional<Verdict> ParseLine(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  for (std::string word; std::getline(stream, word, ' ');) words.push_back(word);
  Verdict verdict;
  if (words.size() != 7 + verdict.scores.size()) return std::nullopt;
  const auto owner = Decoded(words[0]), model = Decoded(words[1]), revision = Decoded(words[2]);
  const auto tier = TierOf(words[4]);
  if (!owner || !model || !revision || !tier || (words[5] != "open" && words[5] != "closed")) return std::nullopt;
  verdict.key = {*owner, *model, *revision, 0, *tier};
  verdict.open = words[5] == "open";
  if (!Parsed(words[3], 0u, 65535u, &verdict.key.codec_version)) return std::nullopt;
  if (!Parsed(words[6], int64_t{0}, int64_t{1} << 40, &verdict.unix_seconds)) return std::nullopt;
  for (size_t i = 0; i < verdict.scores.size(); ++i) {
    if (!ParseScore(words[7 + i], &verdict.scores[i])) return std::nullopt;
  }
  return verdict;
}

std::string ChecksumLine(const std::string& text) {
  char line[32];
  std::snprintf(line, sizeof line, "crc32c %08x\n", Crc32c(0, text.data(), text.size()));
  return line;
}

absl::Status Wrong(size_t line, const std::string& what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "VERDICTS_FILE", "line " + std::to_string(line) + " " + what,
                   {{"line", std::to_string(line)}});
}

}  // namespace

std::string FormatVerdicts(const std::vector<Verdict>& verdicts) {
  std::string text = std::string(kTitle) + "\n";
  for (const Verdict& verdict : verdicts) text += LineOf(verdict);
  return text + ChecksumLine(text);
}

absl::StatusOr<std::vector<Verdict>> ParseVerdicts(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) return Wrong(lines.size() + 1, "is cut off");
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
    if (lines.size() > kMaxVerdicts + 2) return Wrong(lines.size(), "is one too many");
  }
  if (lines.empty() || lines[0] != kTitle) return Wrong(1, std::string("is not \"") + kTitle + "\"");
  if (lines.size() < 2) return Wrong(2, "is missing");
  const std::string last = lines.back() + "\n";
  if (last != ChecksumLine(text.substr(0, text.size() - last.size())))
    return Wrong(lines.size(), "is not the checksum of the others");
  std::vector<Verdict> verdicts;
  std::set<VerdictKey> seen;
  for (size_t i = 1; i + 1 < lines.size(); ++i) {
    const auto verdict = ParseLine(lines[i]);
    if (!verdict.has_value()) return Wrong(i + 1, "is no verdict");
    if (!seen.insert(verdict->key).second) return Wrong(i + 1, "is about the same as an earlier one");
    verdicts.push_back(*verdict);
  }
  return verdicts;
}

}  // namespace spectrumkv

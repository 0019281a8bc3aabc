// Trials of the quality gate: what a model is asked, and whether it has passed. Pure: the same seed gives the same
// trials on every machine. Source: the probe of the SpectrumKV paper (arXiv 2606.08635), which asks for needles alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spectrumkv {

// Numbers as TrialKind of probe_service.proto.
enum class TrialKind { kNeedle = 1, kContinuation, kCode };
inline constexpr TrialKind kTrialKinds[] = {TrialKind::kNeedle, TrialKind::kContinuation, TrialKind::kCode};

struct Trial {
  std::string id;
  TrialKind kind = TrialKind::kNeedle;
  std::string prompt, suffix;
  std::string expected;  // of a needle; not told to the worker
  double depth = 0;      // of a needle
};

inline constexpr uint32_t kMinPromptCharacters = 1500, kMaxPromptCharacters = 100000;
// Fewer say nothing about a share of nine tenths.
inline constexpr uint32_t kMinAgreementPositions = 20;

// `each` trials of every kind, with prompts of about `prompt_characters`. REQUIRES: kMinPromptCharacters <=
// prompt_characters <= kMaxPromptCharacters.
std::vector<Trial> MakeTrials(uint64_t seed, uint32_t each, uint32_t prompt_characters);

// Whether the answer has what was hidden, and nothing that only looks like it (a longer number).
bool AnswersNeedle(const Trial& trial, const std::string& answer);
// REQUIRES: positions > 0.
bool Agrees(uint32_t positions, uint32_t agreed, double min_agreement);

}  // namespace spectrumkv

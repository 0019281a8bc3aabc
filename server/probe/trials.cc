#include "server/probe/trials.h"

#include <cctype>
#include <cstddef>

#include "server/probe/passages.h"

namespace spectrumkv {
namespace {

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Below(uint64_t bound) {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % bound;
  }
  template <size_t n>
  const char* Of(const char* const (&words)[n]) {
    return words[Below(n)];
  }

 private:
  uint64_t state_;
};

constexpr const char* kPlaces[] = {"Aldham", "Birkfield", "Corran", "Dunmere", "Eastwick", "Fenlow", "Garth", "Holme"};
constexpr const char* kWho[] = {"The baker",   "An old sailor", "The schoolteacher", "A farmer",
                                "The postman", "A traveller",   "The doctor",        "A young painter"};
constexpr const char* kDid[] = {"walked along the river",      "waited for the evening train",
                                "repaired a wooden fence",     "told a story about the sea",
                                "bought apples at the market", "wrote a long letter",
                                "looked for a lost umbrella",  "watched the clouds above the hills"};
constexpr const char* kWhen[] = {"early in the morning", "on a rainy afternoon",   "at the end of the week",
                                 "before the winter",    "during the summer fair", "late in the evening"};
constexpr const char* kThen[] = {"Nobody was in a hurry.",
                                 "The street was quiet again.",
                                 "It had rained all night.",
                                 "The bells rang at noon.",
                                 "There was bread and cheese for supper.",
                                 "A dog slept in front of the door."};
constexpr const char* kColours[] = {"amber", "silver", "crimson", "golden", "violet", "copper"};
constexpr const char* kAnimals[] = {"falcon", "heron", "otter", "badger", "lynx", "raven"};

// Sentences of no importance, without any digit.
std::string Filler(Random* random, size_t characters) {
  std::string text;
  while (text.size() < characters) {
    text += std::string(random->Of(kWho)) + " from " + random->Of(kPlaces) + " " + random->Of(kDid) + " " +
            random->Of(kWhen) + ". ";
    if (random->Below(3) == 0) text += std::string(random->Of(kThen)) + " ";
  }
  return text;
}

Trial NeedleTrial(Random* random, uint32_t number, uint32_t each, uint32_t characters) {
  Trial trial;
  trial.kind = TrialKind::kNeedle;
  trial.expected = std::to_string(10000 + random->Below(90000));
  const std::string name = std::string(random->Of(kColours)) + " " + random->Of(kAnimals);
  const std::string needle = "Remember this: the passkey of the " + name + " is " + trial.expected + ". ";
  const size_t filler = characters - needle.size();
  trial.depth = (number + 0.5) / each;
  trial.prompt = Filler(random, static_cast<size_t>(trial.depth * static_cast<double>(filler))) + needle;
  if (trial.prompt.size() < characters) trial.prompt += Filler(random, characters - trial.prompt.size());
  trial.suffix = "\nThe question was about the passkey. The passkey of the " + name + " is";
  return trial;
}

Trial PassageTrial(TrialKind kind, const Passage& passage, Random* random, uint32_t characters) {
  Trial trial;
  trial.kind = kind;
  const std::string head = passage.head;
  if (head.size() < characters) trial.prompt = Filler(random, characters - head.size()) + "\n\n";
  trial.prompt += head;
  trial.suffix = passage.tail;
  return trial;
}

}  // namespace

std::vector<Trial> MakeTrials(uint64_t seed, uint32_t each, uint32_t prompt_characters) {
  Random random(seed);
  std::vector<Trial> trials;
  for (const TrialKind kind : kTrialKinds) {
    const size_t first = random.Below(kPassages);
    for (uint32_t i = 0; i < each; ++i) {
      const size_t passage = (first + i) % kPassages;
      trials.push_back(kind == TrialKind::kNeedle
                           ? NeedleTrial(&random, i, each, prompt_characters)
                           : PassageTrial(kind, (kind == TrialKind::kCode ? kPrograms : kProse)[passage], &random,
                                          prompt_characters));
      trials.back().id = std::to_string(trials.size());
    }
  }
  return trials;
}

bool AnswersNeedle(const Trial& trial, const std::string& answer) {
  const auto digit = [&](size_t at) {
    return at < answer.size() && std::isdigit(static_cast<unsigned char>(answer[at])) != 0;
  };
  for (size_t at = answer.find(trial.expected); at != std::string::npos; at = answer.find(trial.expected, at + 1)) {
    if ((at == 0 || !digit(at - 1)) && !digit(at + trial.expected.size())) return true;
  }
  return false;
}

bool Agrees(uint32_t positions, uint32_t agreed, double min_agreement) {
  return static_cast<double>(agreed) >= min_agreement * static_cast<double>(positions);
}

}  // namespace spectrumkv

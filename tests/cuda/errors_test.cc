// Which errors end a process: what the toolkit's own words about each say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {
namespace {

// Of `enum cudaError` in driver_types.h: numbers, and what stands above each.
std::map<int, std::string> WordsOfErrors(const std::string& header) {
  std::ifstream file(header);
  std::stringstream text;
  text << file.rdbuf();
  std::map<int, std::string> errors;
  std::istringstream lines(text.str());
  const std::regex constant(R"(^\s*(cudaError\w+|cudaSuccess)\s*=\s*(\d+).*)");
  std::string words;
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, match, constant)) {
      errors[std::stoi(match[2])] = words;
      words.clear();
    } else {
      words += line.substr(std::min(line.size(), line.find_first_not_of(" *"))) + " ";
    }
  }
  return errors;
}

TEST(ErrorsTest, WhatEndsTheProcessIsSticky) {
  const std::string header = DRIVER_TYPES_HEADER;
  if (header.empty()) {
    std::printf("SKIPPED: the toolkit's words about its errors: no toolkit\n");
    return;
  }
  const std::map<int, std::string> errors = WordsOfErrors(header);
  ASSERT_GT(errors.size(), 100u);
  int sticky = 0;
  for (const auto& [error, words] : errors) {
    const bool ends = words.find("must be terminated and relaunched") != std::string::npos;
    // A device that has lost memory, a link or its containment works on nothing either, though the words do not say so.
    const bool lost = error == kEccUncorrectable || error == 220 || error == 226;
    EXPECT_EQ(IsSticky(error), ends || lost) << error << ": " << words;
    sticky += ends || lost ? 1 : 0;
  }
  std::printf("%d of %d errors end everything on the device\n", sticky, static_cast<int>(errors.size()));
}

}  // namespace
}  // namespace spectrumkv::gpu

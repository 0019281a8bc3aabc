// From "setp.lt.and.s32" to an Instruction without operands. Internal to the parser.
#pragma once

#include <string>

#include "tests/cuda/ptx/instruction.h"

namespace spectrumkv::ptx {

// False where `word` is no type.
bool ReadType(const std::string& word, Type* type);

// Throws Fault with the reason where the instruction is unknown or not reproducible. `text` names it there.
Instruction DecodeWords(const std::string& words, const std::string& text);

}  // namespace spectrumkv::ptx

// What one instruction makes of its operands: arithmetic, conversions, comparisons. No memory, no other thread.
#pragma once

#include <cstdint>

#include "tests/cuda/ptx/instruction.h"

namespace spectrumkv::ptx {

// The value as a register of this type holds it: signed types are extended, all others cut.
uint64_t Fit(uint64_t value, Type type);

// in: as many as i.ins, as registers hold them. Predicates are 0 or 1. Throws Fault for what it does not know.
// Float results that are NaN are the canonical NaN, 0x7FFFFFFF (float16: 0x7FFF).
uint64_t Evaluate(const Instruction& i, const uint64_t* in);

}  // namespace spectrumkv::ptx

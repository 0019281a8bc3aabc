// Switching between stacks on one OS thread: in x86-64 a dozen instructions, elsewhere ucontext, some ten times slower.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace spectrumkv::shim {

#if defined(__x86_64__)
using Context = void*;  // the stack pointer of whoever is not running
#else
using Context = ucontext_t;
#endif

// A context that calls entry() on this stack when it is first switched to; entry never returns.
void MakeContext(Context* context, char* stack, size_t bytes, void (*entry)());
// Leaves `from`, goes on with `to`; returns when somebody switches back.
void SwitchContext(Context* from, Context* to);

}  // namespace spectrumkv::shim

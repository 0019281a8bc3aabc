// Executes PTX: one thread at a time up to its next collective, with real warps, masks and barriers. Blocks run one
// after another. What a device would not forgive is refused by a Fault that names the instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/cuda/ptx/instruction.h"
#include "tests/cuda/shim/block.h"

namespace spectrumkv::ptx {

// Of all launches of a machine.
struct Counters {
  uint64_t instructions = 0;  // of all threads
  uint64_t global_read_bytes = 0;
  uint64_t global_written_bytes = 0;
};

class Machine {
 public:
  // options.memory: all that may be accessed as global memory; must not be empty.
  explicit Machine(shim::Options options);

  // args: the kernel's one parameter. Throws Fault.
  void Launch(const Kernel& kernel, uint32_t blocks, uint32_t threads, const void* args, size_t bytes,
              uint32_t rows = 1);

  const Counters& counters() const { return counters_; }

 private:
  struct Thread {
    std::vector<uint64_t> registers;
    std::vector<char> local;
    uint32_t index = 0;
    int pc = 0;
    int waiting = -1;  // the instruction it waits at
    uint32_t mask = 0;
    bool done = false;

    uint32_t lane() const { return index % 32; }
    uint32_t warp() const { return index / 32; }
  };

  void RunBlock();
  // Runs until the thread ends or waits.
  void Step(Thread* thread);
  bool Arrive(Thread* thread, const Instruction& i);  // true: it may go on at once
  void CompleteWarp(const Thread& last);
  void CompleteBlock();
  uint64_t Shuffle(Thread* thread, const Instruction& i, uint32_t mask);
  uint64_t Get(const Thread& thread, const Operand& operand) const;
  char* Where(const Instruction& i, Thread* thread, const Operand& address, size_t bytes);
  void Move(const Instruction& i, Thread* thread);
  void Load(const Instruction& i, Thread* thread);
  void Store(const Instruction& i, Thread* thread);
  void Atomic(const Instruction& i, Thread* thread);

  shim::Options options_;
  std::mt19937 random_;
  Counters counters_;
  const Kernel* kernel_ = nullptr;
  uint32_t blocks_ = 0, rows_ = 1, block_ = 0, live_ = 0;
  std::vector<char> params_, shared_;
  std::vector<Thread> threads_;
};

}  // namespace spectrumkv::ptx

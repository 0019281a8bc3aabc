#include "tests/cuda/ptx/machine.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "tests/cuda/ptx/alu.h"

namespace spectrumkv::ptx {
namespace {

constexpr size_t kMaxOperands = 8;
constexpr uint64_t kUnset = 0xDEADBEEFDEADBEEF;  // registers before they are written
constexpr char kUnsetByte = static_cast<char>(0xCD);

bool Waits(Opcode op) {
  return op == Opcode::kBar || op == Opcode::kBarWarp || op == Opcode::kShfl || op == Opcode::kVote;
}

}  // namespace

Machine::Machine(shim::Options options) : options_(std::move(options)), random_(options_.seed) {
  if (options_.memory.empty()) throw Fault("no memory was given");
}

void Machine::Launch(const Kernel& kernel, uint32_t blocks, uint32_t threads, const void* args, size_t bytes,
                     uint32_t rows) {
  if (static_cast<int>(bytes) != kernel.param_bytes) throw Fault("size of the parameter of " + kernel.name);
  kernel_ = &kernel;
  blocks_ = blocks;
  rows_ = rows;
  params_.assign(static_cast<const char*>(args), static_cast<const char*>(args) + bytes);
  threads_.resize(threads);
  std::vector<uint32_t> turns(size_t{blocks} * rows);
  for (uint32_t i = 0; i < turns.size(); ++i) turns[i] = i;
  if (options_.order == shim::Order::kReverse) std::reverse(turns.begin(), turns.end());
  if (options_.order == shim::Order::kRandom) std::shuffle(turns.begin(), turns.end(), random_);
  for (uint32_t block : turns) {
    block_ = block;
    RunBlock();
  }
}

void Machine::RunBlock() {
  shared_.assign(static_cast<size_t>(kernel_->shared_bytes), kUnsetByte);
  std::vector<uint32_t> turns(threads_.size());
  for (uint32_t i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    thread.registers.assign(static_cast<size_t>(kernel_->registers), kUnset);
    thread.local.assign(static_cast<size_t>(kernel_->local_bytes), kUnsetByte);
    thread.index = turns[i] = i;
    thread.pc = 0;
    thread.waiting = -1;
    thread.done = false;
  }
  live_ = static_cast<uint32_t>(threads_.size());
  if (options_.order == shim::Order::kReverse) std::reverse(turns.begin(), turns.end());
  while (live_ != 0) {
    if (options_.order == shim::Order::kRandom) std::shuffle(turns.begin(), turns.end(), random_);
    bool moved = false;
    for (uint32_t turn : turns) {
      Thread& thread = threads_[turn];
      if (thread.done || thread.waiting >= 0) continue;
      moved = true;
      Step(&thread);
    }
    if (moved) continue;
    for (const Thread& thread : threads_) {
      if (thread.done) continue;
      throw Fault("deadlock: thread " + std::to_string(thread.index) +
                  " waits for others that never come: " + kernel_->code[static_cast<size_t>(thread.waiting)].text);
    }
  }
}

void Machine::Step(Thread* thread) {
  for (;;) {
    if (static_cast<size_t>(thread->pc) >= kernel_->code.size()) throw Fault("ran past the end of " + kernel_->name);
    const Instruction& i = kernel_->code[static_cast<size_t>(thread->pc)];
    ++counters_.instructions;
    if (i.guard >= 0 && ((thread->registers[static_cast<size_t>(i.guard)] & 1) != 0) == i.guard_negated) {
      ++thread->pc;
      continue;
    }
    switch (i.op) {
      case Opcode::kBra: thread->pc = i.target; continue;
      case Opcode::kRet:
        thread->done = true;
        --live_;
        CompleteBlock();  // who has ended holds up no barrier
        return;
      case Opcode::kRefused: throw Fault(i.text);
      case Opcode::kLd: Load(i, thread); break;
      case Opcode::kSt: Store(i, thread); break;
      case Opcode::kAtom: Atomic(i, thread); break;
      case Opcode::kMov: Move(i, thread); break;
      case Opcode::kCvta:
        if (i.space != Space::kGlobal) throw Fault("unsupported: " + i.text);
        thread->registers[static_cast<size_t>(i.outs[0].reg)] = Get(*thread, i.ins[0]);
        break;
      default:
        if (Waits(i.op)) {
          if (!Arrive(thread, i)) return;
          continue;
        }
        uint64_t in[kMaxOperands];
        for (size_t n = 0; n < i.ins.size(); ++n) in[n] = Get(*thread, i.ins[n]);
        thread->registers[static_cast<size_t>(i.outs[0].reg)] = Evaluate(i, in);
        break;
    }
    ++thread->pc;
  }
}

// --- Collectives

bool Machine::Arrive(Thread* thread, const Instruction& i) {
  thread->waiting = thread->pc;
  if (i.op == Opcode::kBar) {
    CompleteBlock();
    return thread->waiting < 0;
  }
  const size_t mask = i.op == Opcode::kBarWarp ? 0 : i.op == Opcode::kVote ? 1 : 3;
  thread->mask = static_cast<uint32_t>(Get(*thread, i.ins[mask]));
  if ((thread->mask >> thread->lane() & 1) == 0) throw Fault("a lane is not in its own mask: " + i.text);
  CompleteWarp(*thread);
  return thread->waiting < 0;
}

void Machine::CompleteBlock() {
  for (const Thread& thread : threads_) {
    if (thread.done) continue;
    if (thread.waiting < 0 || kernel_->code[static_cast<size_t>(thread.waiting)].op != Opcode::kBar) return;
  }
  for (Thread& thread : threads_) {
    if (thread.done) continue;
    thread.waiting = -1;
    ++thread.pc;
  }
}

// The last lane of a mask to arrive serves all.
void Machine::CompleteWarp(const Thread& last) {
  const uint32_t mask = last.mask;
  const Opcode op = kernel_->code[static_cast<size_t>(last.waiting)].op;
  Thread* lanes = threads_.data() + last.warp() * 32;
  const size_t count = std::min<size_t>(32, threads_.size() - last.warp() * 32);
  uint32_t ballot = 0;
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<size_t>(std::countr_zero(left));
    if (lane >= count) return;
    const Thread& thread = lanes[lane];
    if (thread.done || thread.waiting < 0 || thread.mask != mask) return;
    const Instruction& i = kernel_->code[static_cast<size_t>(thread.waiting)];
    if (i.op != op) return;
    if (op == Opcode::kVote && (Get(thread, i.ins[0]) & 1) != 0) ballot |= 1u << lane;
  }
  uint64_t results[32] = {};
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    Thread& thread = lanes[std::countr_zero(left)];
    const Instruction& i = kernel_->code[static_cast<size_t>(thread.waiting)];
    uint64_t& result = results[thread.lane()];
    if (op == Opcode::kShfl) result = Shuffle(&thread, i, mask);
    if (op != Opcode::kVote) continue;
    result = i.action == Action::kBallot ? ballot : i.action == Action::kAny ? ballot != 0 : ballot == mask;
    if (i.action == Action::kNone) throw Fault("unsupported: " + i.text);
  }
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    Thread& thread = lanes[std::countr_zero(left)];
    const Instruction& i = kernel_->code[static_cast<size_t>(thread.waiting)];
    if (!i.outs.empty()) thread.registers[static_cast<size_t>(i.outs[0].reg)] = results[thread.lane()];
    thread.waiting = -1;
    ++thread.pc;
  }
}

// PTX manual, shfl.sync: ins are value, lane, clamp and segment, mask.
uint64_t Machine::Shuffle(Thread* thread, const Instruction& i, uint32_t mask) {
  const auto lane = static_cast<int>(thread->lane()), b = static_cast<int>(Get(*thread, i.ins[1]) & 31);
  const auto c = static_cast<uint32_t>(Get(*thread, i.ins[2]));
  const int segment = static_cast<int>(c >> 8 & 31), clamp = static_cast<int>(c & 31);
  const int low = lane & segment, high = low | (clamp & ~segment);
  int from = lane;
  bool inside = true;
  switch (i.action) {
    case Action::kUp:
      from = lane - b;
      inside = from >= high;
      break;
    case Action::kDown:
      from = lane + b;
      inside = from <= high;
      break;
    case Action::kXor:
      from = lane ^ b;
      inside = from <= high;
      break;
    case Action::kIdx:
      from = low | (b & ~segment);
      inside = from <= high;
      break;
    default: throw Fault("unsupported: " + i.text);
  }
  if (!inside) from = lane;
  if ((mask >> from & 1) == 0) throw Fault("a shuffle reads a lane outside of its mask: " + i.text);
  if (i.predicate_out >= 0) thread->registers[static_cast<size_t>(i.predicate_out)] = inside ? 1 : 0;
  const Thread& source = threads_[thread->warp() * 32 + static_cast<uint32_t>(from)];
  return Get(source, kernel_->code[static_cast<size_t>(source.waiting)].ins[0]);
}

// --- Operands and memory

uint64_t Machine::Get(const Thread& thread, const Operand& operand) const {
  switch (operand.form) {
    case Operand::kRegister: {
      const uint64_t value = thread.registers[static_cast<size_t>(operand.reg)];
      return operand.negated ? (value & 1) ^ 1 : value;
    }
    case Operand::kImmediate: return operand.value;
    case Operand::kSpecial: break;
    case Operand::kAddress: throw Fault("an address where a value belongs");
  }
  switch (operand.special) {
    case Special::kTid: return thread.index;
    case Special::kNtid: return threads_.size();
    case Special::kCtaid: return block_ % blocks_;
    case Special::kCtaidY: return block_ / blocks_;
    case Special::kNctaid: return blocks_;
    case Special::kNctaidY: return rows_;
    case Special::kLane: return thread.lane();
  }
  return 0;
}

char* Machine::Where(const Instruction& i, Thread* thread, const Operand& address, size_t bytes) {
  const uint64_t at =
      address.value + (address.reg >= 0 ? thread->registers[static_cast<size_t>(address.reg)] : uint64_t{0});
  if (at % bytes != 0) throw Fault("misaligned: " + i.text);
  std::vector<char>* own = i.space == Space::kParam    ? &params_
                           : i.space == Space::kShared ? &shared_
                           : i.space == Space::kLocal  ? &thread->local
                                                       : nullptr;
  if (own != nullptr) {
    if (at > own->size() || bytes > own->size() - at) throw Fault("out of bounds: " + i.text);
    return own->data() + at;
  }
  for (const shim::Range& range : options_.memory) {
    const auto begin = reinterpret_cast<uintptr_t>(range.begin);
    if (at >= begin && at - begin + bytes <= range.bytes) return reinterpret_cast<char*>(at);
  }
  throw Fault("outside of every allocation: " + i.text);
}

void Machine::Load(const Instruction& i, Thread* thread) {
  const size_t bytes = static_cast<size_t>(i.type.bits) / 8;
  const char* from = Where(i, thread, i.ins[0], bytes * i.outs.size());
  if (i.space == Space::kGlobal) counters_.global_read_bytes += bytes * i.outs.size();
  for (size_t n = 0; n < i.outs.size(); ++n) {
    uint64_t value = 0;
    std::memcpy(&value, from + n * bytes, bytes);
    thread->registers[static_cast<size_t>(i.outs[n].reg)] = Fit(value, i.type);
  }
}

void Machine::Store(const Instruction& i, Thread* thread) {
  const size_t bytes = static_cast<size_t>(i.type.bits) / 8, count = i.ins.size() - 1;
  if (i.space == Space::kParam) throw Fault("unsupported: " + i.text);
  char* to = Where(i, thread, i.ins[0], bytes * count);
  if (i.space == Space::kGlobal) counters_.global_written_bytes += bytes * count;
  for (size_t n = 0; n < count; ++n) {
    const uint64_t value = Get(*thread, i.ins[n + 1]);
    std::memcpy(to + n * bytes, &value, bytes);
  }
}

// mov, also of several registers into one and back.
void Machine::Move(const Instruction& i, Thread* thread) {
  const size_t outs = i.outs.size(), ins = i.ins.size();
  if (outs == 1 && ins == 1) {
    const uint64_t value = Get(*thread, i.ins[0]);
    thread->registers[static_cast<size_t>(i.outs[0].reg)] = Evaluate(i, &value);
    return;
  }
  const int bits = i.type.bits / static_cast<int>(std::max(outs, ins));
  uint64_t whole = 0;
  for (size_t n = 0; n < ins; ++n) {
    const uint64_t part = Get(*thread, i.ins[n]);
    whole |= (ins == 1 ? part : Fit(part, Type{Kind::kBits, bits})) << (bits * static_cast<int>(n));
  }
  for (size_t n = 0; n < outs; ++n) {
    thread->registers[static_cast<size_t>(i.outs[n].reg)] =
        outs == 1 ? whole : Fit(whole >> (bits * static_cast<int>(n)), Type{Kind::kBits, bits});
  }
}

void Machine::Atomic(const Instruction& i, Thread* thread) {
  if (i.type.kind == Kind::kFloat || i.action == Action::kNone) throw Fault("unsupported: " + i.text);
  const size_t bytes = static_cast<size_t>(i.type.bits) / 8;
  char* at = Where(i, thread, i.ins[0], bytes);
  uint64_t in[2] = {0, Get(*thread, i.ins[1])};
  std::memcpy(&in[0], at, bytes);
  Instruction combine = i;
  combine.ins.resize(2);
  combine.op = i.action == Action::kAdd   ? Opcode::kAdd
               : i.action == Action::kMin ? Opcode::kMin
               : i.action == Action::kMax ? Opcode::kMax
               : i.action == Action::kAnd ? Opcode::kAnd
                                          : Opcode::kOr;
  const uint64_t value = i.action == Action::kExch ? in[1] : Evaluate(combine, in);
  std::memcpy(at, &value, bytes);
  if (i.returns) thread->registers[static_cast<size_t>(i.outs[0].reg)] = in[0];
}

}  // namespace spectrumkv::ptx

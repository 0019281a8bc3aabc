#include "tests/cuda/shim/block.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <memory>
#include <random>

#include "tests/cuda/shim/context.h"
#include "tests/cuda/shim/sanitizers.h"

namespace spectrumkv::shim {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr uint32_t kLanes = 32;
constexpr const char* kOpNames[] = {"nothing", "a shuffle", "a vote", "__syncwarp", "__syncthreads"};

struct Fiber {
  uint32_t index = 0;
  Op waiting = Op::kNone;
  bool done = false;
  uint32_t mask = 0, source = 0;
  uint64_t in = 0, out = 0;
  Context context{};
  StackMarks marks;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  char arrived = 0, woken = 0;  // their addresses carry TSan's clocks

  uint32_t lane() const { return index % kLanes; }
  uint32_t warp() const { return index / kLanes; }
};

struct Grid {
  const Options* options = nullptr;
  uint32_t blocks = 0, rows = 0, threads = 0, block = 0;
  const std::function<void()>* body = nullptr;
  std::vector<Fiber> fibers;
  std::vector<uint32_t> warp_waiting;  // lanes, by warp, that wait for a warp's collective
  uint32_t block_waiting = 0, live = 0;
  Fiber* self = nullptr;
  Context main{};
  StackMarks main_marks;
  std::string fault;
  char started = 0, ended = 0;  // TSan's clocks
};

Grid* now = nullptr;  // one OS thread

void ToMain(bool dying = false) {
  Fiber& self = *now->self;
  BeforeSwitch(&self.marks, now->main_marks, dying);
  SwitchContext(&self.context, &now->main);
  AfterSwitch(self.marks, nullptr);
}

void ToFiber(Fiber* fiber) {
  now->self = fiber;
  BeforeSwitch(&now->main_marks, fiber->marks, false);
  SwitchContext(&now->main, &fiber->context);
  AfterSwitch(now->main_marks, nullptr);
}

// Ends the launch; the main context throws, and nobody comes back here.
void Fail(const char* what) {
  if (now->fault.empty()) {
    now->fault = std::string(what) + " (block " + std::to_string(now->block) + ", thread " +
                 std::to_string(now->self->index) + ")";
  }
  ToMain();
}

void Wake(Fiber* fiber, bool orders) {
  if (orders) Release(&fiber->woken);
  fiber->waiting = Op::kNone;
}

void CompleteBlock() {
  if (now->block_waiting != now->live || now->live == 0) return;
  for (Fiber& fiber : now->fibers) {
    if (!fiber.done) Acquire(&fiber.arrived);
  }
  for (Fiber& fiber : now->fibers) {
    if (!fiber.done) Wake(&fiber, true);
  }
  now->block_waiting = 0;
}

// The last lane of a mask to arrive serves all.
void CompleteWarp(const Fiber& last) {
  const Op op = last.waiting;
  const uint32_t mask = last.mask, warp = last.warp();
  if ((now->warp_waiting[warp] & mask) != mask) return;
  Fiber* lanes = now->fibers.data() + warp * kLanes;
  uint64_t ballot = 0;
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const Fiber& lane = lanes[std::countr_zero(left)];
    if (lane.waiting != op || lane.mask != mask) return;
    if (lane.in != 0) ballot |= uint64_t{1} << lane.lane();
  }
  const bool orders = op == Op::kSyncWarp;
  for (uint32_t left = mask; orders && left != 0; left &= left - 1) Acquire(&lanes[std::countr_zero(left)].arrived);
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    Fiber& lane = lanes[std::countr_zero(left)];
    if (op == Op::kShuffle && (mask >> lane.source & 1) == 0) return Fail("a shuffle reads a lane outside of its mask");
    lane.out = op == Op::kShuffle ? lanes[lane.source].in : ballot;
  }
  for (uint32_t left = mask; left != 0; left &= left - 1) Wake(&lanes[std::countr_zero(left)], orders);
  now->warp_waiting[warp] &= ~mask;
}

void Entry() {
  AfterSwitch(now->self->marks, &now->main_marks);
  Acquire(&now->started);
  (*now->body)();
  {
    const Unwatched here;
    Release(&now->ended);
    now->self->done = true;
    --now->live;
    CompleteBlock();  // who has ended holds up no barrier
  }
  ToMain(true);
}

[[noreturn]] void ThrowDeadlock() {
  std::string who;
  for (const Fiber& fiber : now->fibers) {
    if (fiber.done) continue;
    char text[96];
    std::snprintf(text, sizeof(text), " [thread %u at %s, mask %08x]", fiber.index,
                  kOpNames[static_cast<int>(fiber.waiting)], fiber.mask);
    who += text;
    if (who.size() > 200) break;
  }
  throw Fault("deadlock: threads wait for others that never come:" + who);
}

void RunBlock(std::mt19937* random) {
  Grid& grid = *now;
  std::vector<uint32_t> turns(grid.threads);
  for (Fiber& fiber : grid.fibers) {
    fiber.waiting = Op::kNone;
    fiber.done = false;
    CleanStack(fiber.stack.get(), kStackBytes);
    MakeContext(&fiber.context, fiber.stack.get(), kStackBytes, Entry);
    turns[fiber.index] = fiber.index;
  }
  Release(&grid.started);
  grid.live = grid.threads;
  grid.block_waiting = 0;
  std::fill(grid.warp_waiting.begin(), grid.warp_waiting.end(), 0);
  if (grid.options->order == Order::kReverse) std::reverse(turns.begin(), turns.end());
  while (grid.live != 0) {
    if (grid.options->order == Order::kRandom) std::shuffle(turns.begin(), turns.end(), *random);
    bool moved = false;
    for (uint32_t turn : turns) {
      Fiber& fiber = grid.fibers[turn];
      if (fiber.done || fiber.waiting != Op::kNone) continue;
      ToFiber(&fiber);
      moved = true;
      if (!grid.fault.empty()) throw Fault(grid.fault);
    }
    if (!moved) ThrowDeadlock();
  }
  Acquire(&grid.ended);
}

}  // namespace

void RunGrid(const Options& options, uint32_t blocks, uint32_t threads, const std::function<void()>& body,
             uint32_t rows) {
  const Unwatched here;
  // Static: after a launch no watched code may come to where a fiber's last, unordered reads were. Stacks are kept.
  static Grid grid;
  grid.fault.clear();
  grid.options = &options;
  grid.blocks = blocks;
  grid.rows = rows;
  grid.threads = threads;
  grid.body = &body;
  grid.fibers.resize(threads);
  grid.warp_waiting.resize((threads + kLanes - 1) / kLanes);
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& fiber = grid.fibers[i];
    fiber.index = i;
    fiber.marks.bottom = fiber.stack.get();
    fiber.marks.bytes = kStackBytes;
#if defined(__SANITIZE_THREAD__)
    fiber.marks.tsan = __tsan_create_fiber(0);
#endif
  }
#if defined(__SANITIZE_THREAD__)
  grid.main_marks.tsan = __tsan_get_current_fiber();
#endif
  // Also where the launch ends by a fault.
  struct Leave {
    Grid* grid;
    ~Leave() {
#if defined(__SANITIZE_THREAD__)
      for (Fiber& fiber : grid->fibers) __tsan_destroy_fiber(fiber.marks.tsan);
#endif
      now = nullptr;
    }
  } leave{&grid};
  now = &grid;
  std::mt19937 random(options.seed);
  std::vector<uint32_t> turns(size_t{blocks} * rows);
  for (uint32_t i = 0; i < turns.size(); ++i) turns[i] = i;
  if (options.order == Order::kReverse) std::reverse(turns.begin(), turns.end());
  if (options.order == Order::kRandom) std::shuffle(turns.begin(), turns.end(), random);
  for (uint32_t block : turns) {
    grid.block = block;
    RunBlock(&random);
  }
}

Index ThreadIndex() { return Index{now->self->index}; }
Index BlockIndex() { return Index{now->block % now->blocks, now->block / now->blocks}; }
Index BlockSize() { return Index{now->threads, 1, 1}; }
Index GridSize() { return Index{now->blocks, now->rows, 1}; }

uint64_t Collective(Op op, uint32_t mask, uint64_t in, uint32_t source) {
  const Unwatched here;
  Fiber& self = *now->self;
  self.waiting = op;
  self.mask = mask;
  self.in = in;
  self.source = source;
  Release(&self.arrived);
  if (op == Op::kSyncBlock) {
    ++now->block_waiting;
    CompleteBlock();
  } else {
    if ((mask >> self.lane() & 1) == 0) Fail("a lane is not in its own mask");
    now->warp_waiting[self.warp()] |= 1u << self.lane();
    CompleteWarp(self);
  }
  while (self.waiting != Op::kNone) ToMain();
  Acquire(&self.woken);
  return self.out;
}

void CheckAccess(const void* address, uint64_t bytes, const char* what) {
  const Unwatched here;
  const auto at = reinterpret_cast<uintptr_t>(address);
  char fault[96];  // no std::string: nobody comes back to destroy it
  if (at % bytes != 0) {
    std::snprintf(fault, sizeof(fault), "misaligned %llu-byte %s", static_cast<unsigned long long>(bytes), what);
    return Fail(fault);
  }
  const std::vector<Range>& memory = now->options->memory;
  for (const Range& range : memory) {
    const auto begin = reinterpret_cast<uintptr_t>(range.begin);
    if (at >= begin && at - begin + bytes <= range.bytes) return;
  }
  if (memory.empty()) return;
  std::snprintf(fault, sizeof(fault), "%llu-byte %s outside of every allocation",
                static_cast<unsigned long long>(bytes), what);
  Fail(fault);
}

}  // namespace spectrumkv::shim

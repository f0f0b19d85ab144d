// Fibers, blocks, barriers, shared memory and copies of the emulated machine (machine.h), and the C
// functions by which Python drives it. One launch at a time, on one thread.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "pool.h"

dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

Settings settings;

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kArenaBytes = 512 * 1024;
constexpr size_t kGuardBytes = 128;
constexpr size_t kFreeSharedBytes = 48 * 1024;  // of dynamic shared memory, without asking for more
constexpr unsigned kWarp = 32;
constexpr unsigned kGroup = 4 * kWarp;  // a warpgroup's threads
constexpr unsigned kNumBarriers = 16;
constexpr unsigned char kGuard = 0xa5;
constexpr unsigned char kNothing = 0xff;  // NaN in every float type

Pool stacks(kStackBytes, kPageBytes);
Pool arenas(kArenaBytes, 0);

// --- a block -------------------------------------------------------------------------------------
struct Copy {
  uint32_t to;
  void const* from;
  unsigned bytes, valid_bytes;
  int group;
};

struct Fiber {
  enum class State { kReady, kWaiting, kEnded };
  Context context;
  char* stack;
  State state = State::kReady;
  char const* what = "";  // it waits for
  void* operands = nullptr;
  int barrier = -1;
  bool is_at_gate = false;
  std::vector<Copy> copies;
  int num_committed = 0;
  std::vector<std::function<void()>> products;
  int num_products = 0;  // asked for, ever
};

struct Array {
  int line;  // 0: the dynamic one
  size_t begin, bytes;
  size_t guard_end;
};

struct Block {
  Launch const& launch;
  dim3 index;
  bool is_gate_open;
  bool was_released = false;  // a barrier, since threads were last run in order
  std::vector<Fiber> fibers;
  std::vector<unsigned> arrived;  // lanes of each warp
  unsigned waiting[kNumBarriers] = {};
  unsigned needed[kNumBarriers] = {};
  unsigned num_alive;
  char* arena;
  std::vector<Array> arrays;
  size_t end = kGuardBytes;

  Block(Launch const& of, dim3 at, bool open)
      : launch(of),
        index(at),
        is_gate_open(open),
        fibers(of.num_threads),
        arrived((of.num_threads + kWarp - 1) / kWarp),
        num_alive(of.num_threads),
        arena(arenas.take()) {
    for (Fiber& fiber : fibers) fiber.stack = stacks.take();
    addGuard(0, end);
    addArray(0, launch.shared_bytes);
  }
  Block(Block const&) = delete;
  Block& operator=(Block const&) = delete;
  ~Block() {
    for (Fiber& fiber : fibers) stacks.give(fiber.stack);
    arenas.give(arena);
  }

  // Behind a guard, and with one behind it.
  void* addArray(int line, size_t bytes) {
    size_t const begin = end;
    end = (begin + bytes + 2 * kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    std::memset(arena + begin, kNothing, bytes);
    addGuard(begin + bytes, end);
    arrays.push_back({line, begin, bytes, end});
    return arena + begin;
  }
  void addGuard(size_t from, size_t to) {
    std::memset(arena + from, kGuard, to - from);
    ASAN_POISON_MEMORY_REGION(arena + from, to - from);
  }
  bool isGuard(size_t from, size_t to) {
    // Poisoned for the sanitizer, and read here for builds without it.
    ASAN_UNPOISON_MEMORY_REGION(arena + from, to - from);
    return std::all_of(arena + from, arena + to,
                       [](char byte) { return static_cast<unsigned char>(byte) == kGuard; });
  }
  unsigned lanesOf(unsigned warp) const {
    return std::min<unsigned>(kWarp, fibers.size() - warp * kWarp);
  }
};

std::unique_ptr<Launch> pending;
std::unique_ptr<Block> early;  // a block of the pending launch that waits for the one before
std::map<void const*, size_t> allowed_shared_bytes;
std::string error;
std::string reported;

Block* block;  // at work
Fiber* fiber;
Context scheduler;

// Back to the order in which fibers run.
void yield() {
  Fiber* const self = fiber;
  switchTo(self->context, scheduler);
}

void pause(char const* what) {
  fiber->state = Fiber::State::kWaiting;
  fiber->what = what;
  yield();
}

void noteError(std::string const& text) {
  if (error.empty()) error = text;
}

void release(unsigned id) {
  for (Fiber& one : block->fibers) {
    if (one.barrier != static_cast<int>(id)) continue;
    one.barrier = -1;
    one.state = Fiber::State::kReady;
  }
  block->waiting[id] = 0;
  block->was_released = true;
}

void releaseIfComplete(unsigned id) {
  unsigned const needed = block->needed[id] == 0 ? block->num_alive : block->needed[id];
  if (block->waiting[id] != 0 && block->waiting[id] >= needed) release(id);
}

void perform(Copy const& copy) {
  char* const to = bytesOfShared(copy.to, copy.bytes);
  std::memset(to + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
  if (copy.valid_bytes != 0) std::memcpy(to, copy.from, copy.valid_bytes);
}

void runFiber() {
  block->launch.body();
  if (!fiber->copies.empty()) fail("ends while a cp.async of it is on its way");
  if (!fiber->products.empty()) fail("ends while a wgmma of it is on its way");
  fiber->state = Fiber::State::kEnded;
  --block->num_alive;
  releaseIfComplete(0);
  while (true) switchTo(fiber->context, scheduler);
}

void resume(Block& of, unsigned index) {
  fiber = &of.fibers[index];
  threadIdx = dim3(index, 0, 0);
  switchTo(scheduler, fiber->context);
}

// Runs a warp's threads in order until none can go on, or a barrier of the block is complete.
bool runWarp(Block& of, unsigned warp) {
  unsigned const num_lanes = of.lanesOf(warp);
  bool has_run = false;
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (unsigned i = 0; i < num_lanes; ++i) {
      unsigned const lane = settings.is_descending ? num_lanes - 1 - i : i;
      if (of.fibers[warp * kWarp + lane].state != Fiber::State::kReady) continue;
      resume(of, warp * kWarp + lane);
      goes_on = has_run = true;
      if (!error.empty() || of.was_released) return true;
    }
  }
  return has_run;
}

// Runs warp after warp, each as far as it comes, until nobody can go on.
void run(Block& of) {
  block = &of;
  blockIdx = of.index;
  gridDim = of.launch.grid;
  blockDim = dim3(of.launch.num_threads);
  unsigned const num_warps = of.arrived.size();
  for (bool has_run = true; has_run;) {
    has_run = of.was_released = false;
    for (unsigned i = 0; i < num_warps && !of.was_released; ++i) {
      has_run |= runWarp(of, settings.is_descending ? num_warps - 1 - i : i);
      if (!error.empty()) return;
    }
  }
}

void start(Block& of) {
  for (Fiber& one : of.fibers) prepare(one.context, one.stack, runFiber);
  run(of);
}

std::string nameOf(dim3 index) {
  return "block " + std::to_string(index.x) + ", " + std::to_string(index.y);
}

void checkEnd(Block& of) {
  if (!error.empty()) return;
  for (unsigned i = 0; i < of.fibers.size(); ++i) {
    if (of.fibers[i].state == Fiber::State::kEnded) continue;
    noteError(nameOf(of.index) + ", thread " + std::to_string(i) +
              " waits for ever: " + of.fibers[i].what);
    return;
  }
  for (unsigned i = 0; i < of.fibers.size(); ++i) {
    if (of.fibers[i].num_products == of.fibers[i / kGroup * kGroup].num_products) continue;
    noteError(nameOf(of.index) + ", thread " + std::to_string(i) +
              " left its warpgroup alone with a wgmma");
    return;
  }
  bool is_intact = of.isGuard(0, kGuardBytes);
  size_t bytes = 0;
  for (Array const& array : of.arrays) {
    is_intact &= of.isGuard(array.begin + array.bytes, array.guard_end);
    bytes += array.bytes;
  }
  if (!is_intact) noteError(nameOf(of.index) + " wrote beside an array in shared memory");
  if (bytes > static_cast<size_t>(settings.shared_bytes)) {
    noteError(nameOf(of.index) + " has more shared memory than there is");
  }
}

bool isSame(dim3 a, dim3 b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

dim3 indexOf(dim3 grid, uint64_t number) {
  return dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y);
}

void finishPending() {
  if (pending == nullptr) return;
  std::unique_ptr<Launch> const launch = std::move(pending);
  std::unique_ptr<Block> first = std::move(early);
  dim3 const done = first != nullptr ? first->index : dim3(~0u);
  if (first != nullptr && error.empty()) {
    first->is_gate_open = true;
    for (Fiber& one : first->fibers) {
      if (one.is_at_gate) one.state = Fiber::State::kReady;
    }
    run(*first);
    checkEnd(*first);
  }
  first.reset();
  uint64_t const count = uint64_t{launch->grid.x} * launch->grid.y * launch->grid.z;
  for (uint64_t i = 0; i < count && error.empty(); ++i) {
    dim3 const index = indexOf(launch->grid, settings.is_descending ? count - 1 - i : i);
    if (isSame(index, done)) continue;
    Block one(*launch, index, true);
    start(one);
    checkEnd(one);
  }
}

Array const& arrayAt(size_t place, size_t bytes) {
  for (Array const& array : block->arrays) {
    if (place >= array.begin && place + bytes <= array.begin + array.bytes) return array;
  }
  fail("no shared array has %zu bytes at %zu", bytes, place);
  std::abort();
}

}  // namespace

void fail(char const* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  noteError(nameOf(block->index) + ", thread " + std::to_string(threadIdx.x) + ": " + text);
  while (true) switchTo(fiber->context, scheduler);
}

bool enqueue(Launch launch) {
  auto const allowed = allowed_shared_bytes.find(launch.kernel);
  size_t const limit = allowed == allowed_shared_bytes.end() ? kFreeSharedBytes : allowed->second;
  dim3 const grid = launch.grid;
  if (launch.num_threads < 1 || launch.num_threads > 1024 || launch.shared_bytes > limit ||
      grid.x < 1 || grid.x > 0x7fffffff || grid.y < 1 || grid.y > 65535 || grid.z < 1 ||
      grid.z > 65535) {
    return false;
  }
  if (!error.empty()) return true;  // lost: synchronize() tells of the launch that failed
  auto next = std::make_unique<Launch>(std::move(launch));
  std::unique_ptr<Block> ahead;
  if (next->starts_early && pending != nullptr) {
    uint64_t const count = uint64_t{grid.x} * grid.y * grid.z;
    ahead = std::make_unique<Block>(*next, indexOf(grid, settings.is_descending ? count - 1 : 0),
                                    false);
    start(*ahead);
  }
  finishPending();
  pending = std::move(next);
  early = std::move(ahead);
  return true;
}

void allowSharedBytes(void const* kernel, size_t bytes) {
  size_t& allowed = allowed_shared_bytes.emplace(kernel, kFreeSharedBytes).first->second;
  allowed = std::max(allowed, bytes);
}

void together(char const* what, void* operands, void (*work)(void* const* lanes)) {
  unsigned const warp = threadIdx.x / kWarp;
  unsigned const num_lanes = block->lanesOf(warp);
  Fiber* const lanes = &block->fibers[warp * kWarp];
  fiber->operands = operands;
  fiber->what = what;
  if (++block->arrived[warp] < num_lanes) return pause(what);
  void* all[kWarp] = {};
  for (unsigned i = 0; i < num_lanes; ++i) {
    if (std::strcmp(lanes[i].what, what) != 0) {
      fail("lane %u is at %s, this one at %s", i, lanes[i].what, what);
    }
    all[i] = lanes[i].operands;
  }
  work(all);
  block->arrived[warp] = 0;
  for (unsigned i = 0; i < num_lanes; ++i) lanes[i].state = Fiber::State::kReady;
  yield();
}

void barrier(unsigned id, unsigned num_threads) {
  if (id >= kNumBarriers) fail("barrier %u", id);
  if (block->waiting[id] != 0 && block->needed[id] != num_threads) {
    fail("barrier %u of %u threads and of %u", id, num_threads, block->needed[id]);
  }
  block->needed[id] = num_threads;
  ++block->waiting[id];
  fiber->barrier = static_cast<int>(id);
  fiber->state = Fiber::State::kWaiting;
  fiber->what = "a barrier of the block";
  releaseIfComplete(id);
  yield();
}

void waitForPredecessor() {
  if (block->is_gate_open) return;
  fiber->is_at_gate = true;
  pause("the launch before");
  fiber->is_at_gate = false;
}

void* staticShared(int line, size_t bytes) {
  for (Array const& array : block->arrays) {
    if (array.line == line) return block->arena + array.begin;
  }
  return block->addArray(line, bytes);
}

void* dynamicShared() { return block->arena + block->arrays[0].begin; }

uint32_t addressOfShared(void const* pointer) {
  auto const place = static_cast<char const*>(pointer) - block->arena;
  if (place < 0 || place > static_cast<int64_t>(kArenaBytes)) fail("not a shared address");
  return static_cast<uint32_t>(place);
}

char* bytesOfShared(uint32_t address, unsigned bytes) {
  if (address % bytes != 0) fail("%u bytes at shared address %u", bytes, address);
  arrayAt(address, bytes);
  return block->arena + address;
}

void copyAsync(uint32_t to, void const* from, unsigned bytes, unsigned valid_bytes) {
  if (valid_bytes > bytes) fail("cp.async of %u bytes of %u", valid_bytes, bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("cp.async from %p", from);
  Copy const copy{to, from, bytes, valid_bytes, fiber->num_committed};
  bytesOfShared(to, bytes);
  if (settings.copies_late) {
    fiber->copies.push_back(copy);
  } else {
    perform(copy);
  }
}

void commitCopies() { ++fiber->num_committed; }

void waitForCopies(int num_pending) {
  auto& copies = fiber->copies;
  auto const isDue = [&](Copy const& copy) {
    return num_pending < 0 || copy.group < fiber->num_committed - num_pending;
  };
  for (Copy const& copy : copies) {
    if (isDue(copy)) perform(copy);
  }
  copies.erase(std::remove_if(copies.begin(), copies.end(), isDue), copies.end());
}

void multiplyAsync(std::function<void()> product) {
  ++fiber->num_products;
  if (settings.copies_late) {
    fiber->products.push_back(std::move(product));
  } else {
    product();
  }
}

void waitForProducts() {
  auto const products = std::exchange(fiber->products, {});
  for (auto const& product : products) product();
}

}  // namespace emulator

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

EMULATOR_API void emulator_configure(int num_sms, int shared_bytes, int is_descending,
                                     int copies_late, int has_warpgroups) {
  emulator::settings = {num_sms, shared_bytes, is_descending != 0, copies_late != 0,
                        has_warpgroups != 0};
}

// Runs what is enqueued. What went wrong since the last call, or null.
EMULATOR_API char const* emulator_synchronize() {
  emulator::finishPending();
  emulator::reported = std::move(emulator::error);
  emulator::error.clear();
  return emulator::reported.empty() ? nullptr : emulator::reported.c_str();
}

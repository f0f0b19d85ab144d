// The machine that kernels run on when they are compiled for the CPU: what machine.cpp does.
//
// A CUDA thread is a fiber. A fiber runs until it must wait for others, so that a wait that is
// missing shows: others see what it has not made yet, or what it has already overwritten. Shared
// memory is full of NaN when a block starts, and has guards around every array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

extern dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

// What kernels are told of the GPU, and the order in which things happen that CUDA leaves open.
struct Settings {
  int num_sms = 3;
  int shared_bytes = 227 * 1024;  // a block may ask for
  bool is_descending = false;     // threads, warps and blocks, the last first
  bool copies_late = true;        // cp.async and wgmma happen when waited for, or else at once
  bool has_warpgroups = true;     // machine code of sm_90a, or else of another GPU
};
extern Settings settings;

struct Launch {
  void const* kernel;
  dim3 grid;
  unsigned num_threads;
  size_t shared_bytes;
  bool starts_early;  // before its predecessor has ended
  std::function<void()> body;
};

// Whether the launch's sizes are those of a GPU; runs it when the next one comes, or at the end.
bool enqueue(Launch launch);
void allowSharedBytes(void const* kernel, size_t bytes);

// --- for fibers ----------------------------------------------------------------------------------
// Ends the launch with an error; does not return.
void fail(char const* format, ...) __attribute__((format(printf, 1, 2)));

// Waits for all lanes of the warp, who must be at the same `what`; the last one does the work, on
// the operands of all of them (null for lanes that the block does not have).
void together(char const* what, void* operands, void (*work)(void* const* lanes));
// Waits until num_threads threads have come; 0: all that have not ended.
void barrier(unsigned id, unsigned num_threads);
// Waits until the launch before this one has ended.
void waitForPredecessor();

// Memory of a __shared__ variable, by its line in the source.
void* staticShared(int line, size_t bytes);
template <typename T>
T& shared(int line) {
  return *static_cast<T*>(staticShared(line, sizeof(T)));
}
void* dynamicShared();
uint32_t addressOfShared(void const* pointer);
// The bytes at an address; inside one array and aligned to their number.
char* bytesOfShared(uint32_t address, unsigned bytes);

// cp.async: the first valid_bytes from memory, zeros for the rest.
void copyAsync(uint32_t to, void const* from, unsigned bytes, unsigned valid_bytes);
void commitCopies();
void waitForCopies(int num_pending);

// wgmma: a warp's part of a product, which all of its lanes ask for in the same order.
void multiplyAsync(std::function<void()> product);
void waitForProducts();

}  // namespace emulator

// Memory that blocks use one after the other: stacks, and shared memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace emulator {

inline void* allocate(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return memory;
}

class Pool {
 public:
  // guard_bytes: at the low end, whose use ends the process.
  Pool(size_t bytes, size_t guard_bytes) : bytes_(bytes), guard_bytes_(guard_bytes) {}

  char* take() {
    if (free_.empty()) {
      auto* const memory = static_cast<char*>(allocate(guard_bytes_ + bytes_));
      mprotect(memory, guard_bytes_, PROT_NONE);
      return memory + guard_bytes_;
    }
    char* const memory = free_.back();
    free_.pop_back();
    return memory;
  }
  void give(char* memory) {
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes_);
    free_.push_back(memory);
  }

 private:
  size_t bytes_, guard_bytes_;
  std::vector<char*> free_;
};

}  // namespace emulator

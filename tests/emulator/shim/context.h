// Stacks of fibers, and changing from one to another. machine.cpp alone includes this.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t kStackBytes = 256 * 1024;

#ifdef __x86_64__
using Context = void*;  // stack pointer

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

inline void switchTo(Context& from, Context& to) { emulator_switch(&from, to); }

inline void prepare(Context& context, char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // entry's return address: it never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}
#else
using Context = ucontext_t;

inline void switchTo(Context& from, Context& to) { swapcontext(&from, &to); }

inline void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, entry, 0);
}
#endif

}  // namespace emulator

// Fibers: stacks that one thread of the host changes between.
#pragma once
#include <cstddef>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

#ifdef __x86_64__
// swapcontext makes two system calls a change. A change must keep only what a call must keep.
struct Fiber {
    void* sp;

    void prepare(char* stack, size_t bytes, void (*entry)()) {
        char* top = stack + bytes;
        void** words = reinterpret_cast<void**>(top - reinterpret_cast<size_t>(top) % 16 - 64);
        words[6] = reinterpret_cast<void*>(entry);  // below it six registers, above it where entry would return to
        words[7] = nullptr;
        sp = words;
    }
};
__attribute__((naked, noinline)) inline void change_stack(void** /* from: rdi */, void* /* to: rsi */) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
inline void change(Fiber& from, Fiber& to) { change_stack(&from.sp, to.sp); }
#else
struct Fiber {
    ucontext_t context;

    void prepare(char* stack, size_t bytes, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = bytes;
        makecontext(&context, entry, 0);
    }
};
inline void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

}  // namespace emulator

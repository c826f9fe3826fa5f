// A CUDA block on the host: its threads are fibers, which meet at barriers and at the instructions of a warp.
#pragma once
#include <ucontext.h>
#include <sys/mman.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <deque>
#include <algorithm>
using std::min; using std::max;
#define __device__
#define __global__
#define __host__
#define __shared__
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define EMULATED
namespace emu {
struct Copy { unsigned char* dst; const unsigned char* src; };  // src null: zeros
struct Fiber {
    ucontext_t ctx; std::vector<char> stack; bool done = false; int tid;
    uint32_t phase = 0;             // of the warp's meetings
    std::vector<Copy> open; std::deque<std::vector<Copy>> groups;
    std::vector<std::function<void()>> products; std::deque<std::vector<std::function<void()>>> product_groups; std::vector<std::function<void()>> stores;
};
struct Warp { struct Slot { uint64_t v[32][10]; int arrived = 0, done = 0; } slot[2]; };
struct Dim { int x; };
struct Product { std::function<void()> run; };
struct Named { int arrived = 0, phase = 0; };
inline Named named[16]; inline std::deque<std::function<void()>> in_flight;  // copies of TMA
inline Fiber* current; inline ucontext_t scheduler; inline std::vector<Fiber*> fibers; inline std::vector<Warp> warps;
inline int threads, grid, block; inline uint32_t smem_bytes;
inline int bar_arrived, bar_or, bar_phase, bar_result; inline uint64_t progress;
inline std::function<void()> body; inline bool failed;
inline void yield() { swapcontext(&current->ctx, &scheduler); }
inline void entry() { body(); for (auto& f : current->stores) f(); current->done = true; ++progress; swapcontext(&current->ctx, &scheduler); }
inline int sync_or(int x) {
    const int phase = bar_phase; bar_or |= x != 0; ++progress;
    if (++bar_arrived == threads) { bar_result = bar_or; bar_or = 0; bar_arrived = 0; ++bar_phase; return bar_result; }
    while (bar_phase == phase) yield();
    return bar_result;
}
// All lanes hand in N words, and F looks at those of all.
template <int N, class F> auto meet(const uint64_t (&mine)[N], F f) {
    Fiber& me = *current; const int lane = me.tid % 32;
    Warp::Slot& s = warps[me.tid / 32].slot[me.phase++ & 1];
    for (int i = 0; i < N; ++i) s.v[lane][i] = mine[i];
    ++s.arrived; ++progress;
    while (s.arrived < 32) yield();
    auto r = f(s.v, lane);
    if (++s.done == 32) s.arrived = s.done = 0;
    return r;
}
template <class T> uint64_t bits(T x) { uint64_t u = 0; memcpy(&u, &x, sizeof x); return u; }
template <class T> T as(uint64_t u) { T x; memcpy(&x, &u, sizeof x); return x; }
inline void run(unsigned char* smem_base, size_t smem_size, int grid_, int threads_, uint32_t smem_, std::function<void()> f, bool reverse) {
    grid = grid_, threads = threads_, smem_bytes = smem_, body = f; failed = false;
    for (int b = 0; b < grid; ++b) {
        block = reverse ? grid - 1 - b : b;
        memset(smem_base, 0xff, smem_size);
        warps.assign((threads + 31) / 32, Warp()); bar_arrived = bar_or = 0; for (auto& n : named) n = Named();
        for (auto* x : fibers) delete x; fibers.clear();
        for (int t = 0; t < threads; ++t) {
            auto* x = new Fiber; x->tid = t; x->stack.resize(256 * 1024); getcontext(&x->ctx);
            x->ctx.uc_stack.ss_sp = x->stack.data(); x->ctx.uc_stack.ss_size = x->stack.size(); x->ctx.uc_link = nullptr;
            makecontext(&x->ctx, (void (*)())entry, 0); fibers.push_back(x);
        }
        for (;;) {
            const uint64_t before = progress; bool alive = false;
            for (auto* x : fibers) if (!x->done) { alive = true; current = x; swapcontext(&scheduler, &x->ctx); }
            if (!alive) break;
            if (progress == before && !in_flight.empty()) { in_flight.front()(); in_flight.pop_front(); continue; }
            if (progress == before) { fprintf(stderr, "deadlock in block %d\n", block); failed = true; return; }
        }
        for (size_t i = smem_; i < smem_size; ++i) if (smem_base[i] != 0xff) { fprintf(stderr, "shared memory written at %zu, beyond %u\n", i, smem_); failed = true; return; }
    }
}
struct Tid { operator int() const { return 0; } };
}  // namespace emu
#define threadIdx (emu::Dim{emu::current->tid})
#define blockIdx (emu::Dim{emu::block})
#define gridDim (emu::Dim{emu::grid})
struct uint4 { unsigned x, y, z, w; }; inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
struct float4 { float x, y, z, w; }; struct float2 { float x, y; };
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline void __syncthreads() { emu::sync_or(0); }
inline int __syncthreads_or(int x) { return emu::sync_or(x); }
inline void __syncwarp() { uint64_t m[1] = {0}; emu::meet<1>(m, [](auto&, int) { return 0; }); }
inline void __threadfence() {}
template <class T> T shfl(T x, int from) { uint64_t m[2] = {emu::bits(x), 0}; return emu::meet<2>(m, [=](auto& v, int) { return emu::as<T>(v[from][0]); }); }
template <class T> T __shfl_xor_sync(unsigned, T x, int m) { return shfl(x, (emu::current->tid % 32) ^ m); }
template <class T> T __shfl_sync(unsigned, T x, int i, int width = 32) { return shfl(x, emu::current->tid % 32 / width * width + i % width); }
template <class T> T __shfl_up_sync(unsigned, T x, int d) { int l = emu::current->tid % 32; return shfl(x, l >= d ? l - d : l); }
inline unsigned __ballot_sync(unsigned, int x) { uint64_t m[1] = {(uint64_t)(x != 0)}; return emu::meet<1>(m, [](auto& v, int) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (unsigned)v[i][0] << i; return r; }); }
inline int __any_sync(unsigned m, int x) { return __ballot_sync(m, x) != 0; }
inline int __all_sync(unsigned m, int x) { return __ballot_sync(m, x) == 0xffffffffu; }
inline int atomicAdd(int* p, int x) { int o = *p; *p += x; ++emu::progress; return o; }
template <class T> T __ldcg(const T* p) { return *p; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { return emu::as<float>((uint32_t)x); }
inline float __uint_as_float(uint32_t x) { return emu::as<float>(x); }
inline uint32_t __float_as_uint(float x) { return (uint32_t)emu::bits(x); }
inline float __log2f(float x) { return log2f(x); }
inline void __trap() { fprintf(stderr, "trap\n"); abort(); }
alignas(1024) unsigned char smem[256 * 1024];

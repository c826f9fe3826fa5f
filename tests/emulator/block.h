// CUDA blocks on the host, one after the other or by turns. Their threads are fibers of one thread of the host: each runs
// until it has to wait for others, at a barrier or at an instruction that a warp executes together. Kernels are compiled
// with this; what runs them is in scheduler.cpp, which is compiled once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef WATCHES  // for races, see races.cpp
#define WATCHES 0
#endif
#define UNSEEN __attribute__((no_sanitize("thread")))

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Shared memory, up to a page that nobody can access. The kernels declare it as `smem`, each as what it likes.
#define PAGE 4096
#define SHARED_PAGES (57 * PAGE)
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
// Once in each library.
#define SHARED_MEMORY(bytes)                                                                                          \
    extern "C" {                                                                                                      \
    alignas(PAGE) unsigned char emulator_pages[SHARED_PAGES + PAGE];                                                  \
    extern unsigned char emulator_smem[] __asm__("smem");                                                             \
    }                                                                                                                 \
    __asm__(".globl smem\n.set smem, emulator_pages + " TEXT(SHARED_PAGES) " - (" TEXT(bytes) " + 15) / 16 * 16");

namespace emulator {

// Work that is done later, in order: functions, each with a copy of what it captured.
class Steps {
 public:
    Steps() = default;
    Steps(const Steps&) = delete;
    ~Steps();
    template <class F>
    void push_back(const F& f) {
        static_assert(__is_trivially_copyable(F), "a step is copied as bytes");
        static_assert(alignof(F) <= 8, "bytes lie in words");
        append([](const void* captured) { (*static_cast<const F*>(captured))(); }, &f, sizeof f);
    }
    bool empty() const { return first == behind; }
    void do_first();
    void do_all();

 private:
    using Call = void (*)(const void*);
    void append(Call call, const void* captured, size_t bytes);

    uint64_t* words = nullptr;
    size_t size = 0, first = 0, behind = 0;
};
// Work that is done later, in groups: copies of cp.async, and products of wgmma. It is done as late as can be, when the
// group is waited for, so that what does not wait finds it undone; or, some copies with a seed, at once, so that what
// still reads finds it done.
class Groups {
 public:
    Groups() = default;
    Groups(const Groups&) = delete;
    ~Groups();
    template <class F>
    void add(const F& f) {
        steps.push_back(f), ++open;
    }
    void commit();
    void wait(int pending);
    bool committed() const;  // something that was not waited for

 private:
    Steps steps;
    int open = 0;
    struct Counts* counts = nullptr;  // of the steps of each group
};

struct Thread {
    int index;
    bool begun = false;     // the kernel in front has ended
    uint32_t meetings = 0;  // with the other lanes of its warp
    Groups copies, products;
    Steps stores;  // of TMA, from shared memory
    bool (*waits)(const void*) = nullptr;  // asked with `wait` before the thread goes on
    const void* wait = nullptr;
};
// A block that has begun and has not ended.
struct Block {
    int index;
    int any = 0;
    Steps in_flight;  // loads of TMA that end when nothing else can go on
};
// Does a step of the kernel in front. Whether it goes on.
using Front = bool (*)();

extern Thread* thread;  // that runs
extern Block* block;    // of it
extern int threads, blocks;
extern unsigned char* shared_memory;
extern uint32_t smem_bytes;
extern uint64_t events;  // after which a thread that waits may go on
extern Front front;      // null when it has ended

void yield();
// Lets other threads run while f() is true. The scheduler asks, which takes less than a change of stacks.
template <class F>
void yield_while(const F& f) {
    if (!f()) return;
    thread->waits = [](const void* wait) { return (*static_cast<const F*>(wait))(); };
    thread->wait = &f;
    yield();
    thread->waits = nullptr;
}
[[noreturn]] void fail(const char* what, long long value = 0);
void arrive(int barrier, int count);
void sync(int barrier, int count);
bool is_in_a_hurry();  // whether a copy to shared memory ends at once

// In races.cpp. A barrier's phase hands on what threads know; `step` is where all lanes of a warp come. A copy that does
// not land by itself is its thread's, which waits for it.
enum Mark : char { PLAIN, BARRIER, STARTS, LANDS, LANDS_BY_ITSELF };
void forget();  // the block
void mark(uint32_t address, int bytes, Mark mark);
void step();
void release(uint64_t barrier);
void complete(uint64_t barrier, int phase);
void acquire(uint64_t barrier, int phase);

// Values that the lanes of a warp hand in when they meet.
struct Meeting {
    uint64_t words[32][6];
    int came = 0, left = 0;
};
Meeting& hand_in(const uint64_t* mine, int count);  // and wait for the others
void leave(Meeting& meeting);

// All lanes of a warp hand in N words, and each gets f(the words of all, its lane).
template <int N, class F>
auto meet(const uint64_t (&mine)[N], F f) {
    Meeting& meeting = hand_in(mine, N);
    auto result = f(meeting.words, thread->index % 32);
    leave(meeting);
    return result;
}

// Where all lanes of a warp come before one goes on.
inline void align() { meet<1>({0}, [](auto&, int) { return 0; }); }

template <class To, class From>
To bits_as(From from) {
    To to{};
    std::memcpy(&to, &from, sizeof to < sizeof from ? sizeof to : sizeof from);
    return to;
}

// An access to shared memory.
inline unsigned char* shared(uint32_t address, uint32_t bytes) {
    if (address % bytes || address + bytes > smem_bytes) fail("an address that shared memory does not have", address);
    return shared_memory + address;
}

struct Launch {
    unsigned char *pages, *shared_memory;
    int blocks, threads;
    uint32_t smem_bytes;
    bool last_first;
    uint32_t seed;
    Front front;
};
// Runs the blocks one after the other; or, with a seed, by turns and some warps at a time, while a kernel in front of them
// goes on. Whether all came to an end.
bool run(const Launch& launch, void (*kernel)(const void*), const void* arguments);

}  // namespace emulator

// --- CUDA's own names ---

using emulator::shared_memory;
using std::max;
using std::min;
struct Index {
    int x;
};
#define threadIdx (Index{emulator::thread->index})
#define blockIdx (Index{emulator::block->index})
#define gridDim (Index{emulator::blocks})
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void __trap() { emulator::fail("trap"); }
inline void __syncthreads() { emulator::sync(0, emulator::threads); }
int __syncthreads_or(int x);
void __syncwarp();
unsigned __ballot_sync(unsigned, int x);
unsigned __reduce_add_sync(unsigned, unsigned x);
unsigned __reduce_max_sync(unsigned, unsigned x);
uint64_t lane_bits(uint64_t x, int lane);
template <class T>
T lane_value(T x, int lane) {
    return emulator::bits_as<T>(lane_bits(emulator::bits_as<uint64_t>(x), lane));
}
template <class T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
    return lane_value(x, threadIdx.x % 32 / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return lane_value(x, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int delta) {
    return lane_value(x, threadIdx.x % 32 < delta ? threadIdx.x % 32 : threadIdx.x % 32 - delta);
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, !x) == 0; }
template <class T>
T __ldcg(const T* p) {
    return *p;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* p, int x) { return std::exchange(*p, *p + x); }
inline float __int_as_float(int x) { return emulator::bits_as<float>(x); }
inline float __uint_as_float(uint32_t x) { return emulator::bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulator::bits_as<uint32_t>(x); }
inline float __log2f(float x) { return std::log2(x); }

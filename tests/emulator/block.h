// CUDA blocks on the host, one after the other or by turns. Their threads are fibers of one thread of the host: each runs until
// it has to wait for others, at a barrier or at an instruction that a warp executes together. What nothing can end is a
// deadlock, and reported.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fiber.h"

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
#define SHARED_MEMORY(bytes) __asm__(".globl smem\n.set smem, emulator_pages + " TEXT(SHARED_PAGES) " - (" TEXT(bytes) " + 15) / 16 * 16");
extern "C" {
alignas(PAGE) unsigned char emulator_pages[SHARED_PAGES + PAGE];
extern unsigned char shared_memory[] __asm__("smem");
}

namespace emulator {

using Step = std::function<void()>;
// Work that is done later, in groups: copies of cp.async, and products of wgmma. It is done as late as can be, when the
// group is waited for, so that what does not wait finds it undone.
struct Groups {
    std::vector<Step> open;
    std::deque<std::vector<Step>> committed;

    void add(Step step) { open.push_back(std::move(step)); }
    void commit() {
        committed.push_back(std::move(open));
        open.clear();
    }
    void wait(int pending) {
        while (static_cast<int>(committed.size()) > pending) {
            for (Step& step : committed.front()) step();
            committed.pop_front();
        }
    }
};

struct Thread {
    static constexpr int STACK = 128 << 10;

    int index;
    bool ended = false, begun = false;  // begun: the kernel in front has ended
    uint32_t meetings = 0;  // with the other lanes of its warp
    Groups copies, products;
    std::vector<Step> stores;  // of TMA, from shared memory
    Fiber fiber;
    std::unique_ptr<char[]> stack{new char[STACK]};
};
// Values that the lanes of a warp hand in when they meet: for two meetings, for some lanes may be at the next one.
struct Meeting {
    uint64_t words[32][6];
    int came = 0, left = 0;
};
struct Warp {
    Meeting meetings[2];
};
struct Barrier {
    int arrived = 0, phase = 0;
};

// A block that has begun and has not ended.
struct Block {
    int index;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    Barrier barriers[16];
    int any = 0;
    std::deque<Step> in_flight;  // loads of TMA that end when nothing else can go on
    std::vector<unsigned char> shared;  // while another runs
};
// Does a step of the kernel in front. Whether it goes on.
using Front = bool (*)();

inline Thread* thread;  // that runs
inline Block* block;    // of it
inline Fiber scheduler;
inline int threads, blocks;
inline uint32_t smem_bytes;
inline uint64_t events;  // after which a thread that waits may go on
inline Front front;      // null when it has ended
inline Step kernel;
inline size_t hurry;  // one in `hurry` loads of TMA ends at once; 0: none
inline std::minstd_rand dice;

inline void yield() { change(thread->fiber, scheduler); }
inline void fail(const char* what, long long value = 0) {
    std::fprintf(stderr, "thread %d of block %d: %s (%lld)\n", thread ? thread->index : -1, block->index, what, value);
    std::abort();
}

inline void arrive(int id, int count) {
    Barrier& barrier = block->barriers[id];
    ++events;
    if (++barrier.arrived == count) barrier.arrived = 0, ++barrier.phase;
}
inline void sync(int id, int count) {
    const Barrier& barrier = block->barriers[id];
    const int phase = barrier.phase;
    arrive(id, count);
    while (barrier.phase == phase) yield();
}

// All lanes of a warp hand in N words, and each gets f(the words of all, its lane).
template <int N, class F>
auto meet(const uint64_t (&mine)[N], F f) {
    const int lane = thread->index % 32;
    Meeting& meeting = block->warps[thread->index / 32].meetings[thread->meetings++ % 2];
    std::copy(mine, mine + N, meeting.words[lane]);
    ++meeting.came, ++events;
    while (meeting.came < 32) yield();
    auto result = f(meeting.words, lane);
    if (++meeting.left == 32) meeting.came = meeting.left = 0;
    return result;
}

template <class To, class From>
To bits_as(From from) {
    To to{};
    std::memcpy(&to, &from, std::min(sizeof to, sizeof from));
    return to;
}

// An access to shared memory.
inline unsigned char* shared(uint32_t address, uint32_t bytes) {
    if (address % bytes || address + bytes > smem_bytes) fail("an address that shared memory does not have", address);
    return shared_memory + address;
}

inline void entry() {
    kernel();
    for (const auto& group : thread->copies.committed)
        if (!group.empty()) fail("copies on their way to memory that is the next block's");
    for (Step& store : thread->stores) store();
    thread->ended = true, ++events;
    yield();
}

inline std::unique_ptr<Block> begin(int index) {
    auto made = std::make_unique<Block>();
    made->index = index, made->warps.resize(threads / 32);
    made->shared.assign(smem_bytes, 0xff);  // NaN, and -1
    for (int i = 0; i < threads; ++i) {
        Thread& t = *made->threads.emplace_back(new Thread);
        t.index = i;
        t.fiber.prepare(t.stack.get(), Thread::STACK, entry);
    }
    return made;
}
inline void change_to(Block* other) {
    if (block == other) return;
    if (block) std::copy_n(shared_memory, smem_bytes, block->shared.data());
    block = other;
    std::copy_n(block->shared.data(), smem_bytes, shared_memory);
}
// Lets each thread of the block run until it waits, but for those of some warps. Whether the block has not ended.
inline bool run_threads(uint32_t but_warps) {
    bool alive = false;
    for (auto& t : block->threads) {
        if (t->ended) continue;
        alive = true, thread = t.get();
        if (!(but_warps >> t->index / 32 % 32 & 1)) change(scheduler, t->fiber);
    }
    return alive;
}

// Runs the blocks one after the other; or, with a seed, by turns and some warps at a time, while a kernel in front of them goes
// on. Whether all came to an end.
inline bool run(int grid, int block_threads, uint32_t bytes, bool last_first, Step f, uint32_t seed = 0, Front in_front = nullptr) {
    constexpr int PATIENCE = 1 << 14;  // turns in which no block ends
    blocks = grid, threads = block_threads, smem_bytes = bytes, kernel = std::move(f), front = in_front, block = nullptr;
    mprotect(emulator_pages + SHARED_PAGES, PAGE, PROT_NONE);
    std::minstd_rand random(seed);
    auto below = [&](size_t n) { return seed ? static_cast<size_t>(random()) / 8 % n : 0; };
    const size_t at_once = 1 + below(16), pace = 1 << below(7);
    hurry = below(3), dice.seed(seed + 1);
    std::vector<std::unique_ptr<Block>> begun;
    for (int next = 0, turns = 0, idle = 0; next < grid || !begun.empty(); ++turns) {
        if (next < grid && begun.size() < at_once && (begun.empty() || below(4) == 0))
            begun.push_back(begin(last_first ? grid - 1 - next : next)), ++next;
        const size_t chosen = below(begun.size());
        change_to(begun[chosen].get());
        const uint64_t before = events;
        const uint32_t but_warps = below(2) ? random() : 0;
        bool alive = true;
        for (uint64_t at = before - 1, rounds = 1 << (seed ? below(7) : 20); alive && rounds > 0 && events != at; --rounds)
            at = events, alive = run_threads(but_warps);
        if (!alive) {
            begun.erase(begun.begin() + chosen), block = nullptr, turns = 0;
            continue;
        }
        idle = events == before ? idle + 1 : 0;
        if (idle && !block->in_flight.empty()) {
            block->in_flight.front()();
            block->in_flight.pop_front();
            turns = 0;
        } else if (front && (below(pace) == 0 || idle > PATIENCE / 64)) {
            if (!front()) front = nullptr;
            turns = 0;
        } else if (turns == PATIENCE || (!seed && idle)) {
            std::fprintf(stderr, "block %d: all threads wait for each other\n", block->index);
            return false;
        }
    }
    return true;
}

}  // namespace emulator

// --- CUDA's own names ---

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
inline int __syncthreads_or(int x) {
    int& any = emulator::block->any;
    any |= x != 0;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}
inline void __syncwarp() {
    emulator::meet<1>({0}, [](auto&, int) { return 0; });
}
template <class T>
T lane_value(T x, int lane) {
    return emulator::meet<1>({emulator::bits_as<uint64_t>(x)},
                             [=](auto& words, int) { return emulator::bits_as<T>(words[lane][0]); });
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
inline unsigned __ballot_sync(unsigned, int x) {
    return emulator::meet<1>({static_cast<uint64_t>(x != 0)}, [](auto& words, int) {
        unsigned ballot = 0;
        for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(words[i][0]) << i;
        return ballot;
    });
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
    return emulator::meet<1>({x}, [](auto& words, int) {
        unsigned sum = 0;
        for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(words[i][0]);
        return sum;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    return emulator::meet<1>({x}, [](auto& words, int) {
        unsigned most = 0;
        for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<unsigned>(words[i][0]));
        return most;
    });
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, !x) == 0; }
template <class T>
T __ldcg(const T* p) {
    return *p;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int atomicAdd(int* p, int x) { return std::exchange(*p, *p + x); }
inline float __int_as_float(int x) { return emulator::bits_as<float>(x); }
inline float __uint_as_float(uint32_t x) { return emulator::bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulator::bits_as<uint32_t>(x); }
inline float __log2f(float x) { return std::log2(x); }

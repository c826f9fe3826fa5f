// Runs blocks: a library of its own, whose functions the kernels' libraries find when they load.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "block.h"
#include "fiber.h"

namespace emulator {

// --- work that is done later ---

Steps::~Steps() { std::free(words); }
void Steps::append(Call call, const void* captured, size_t bytes) {
    if (empty()) first = behind = 0;
    const size_t more = 2 + (bytes + 7) / 8;
    if (behind + more > size) {
        size = 2 * (behind + more);
        words = static_cast<uint64_t*>(std::realloc(words, size * 8));
    }
    words[behind] = reinterpret_cast<uint64_t>(call), words[behind + 1] = more;
    std::memcpy(words + behind + 2, captured, bytes);
    behind += more;
}
void Steps::do_first() {
    const size_t at = first;
    first += words[at + 1];
    reinterpret_cast<Call>(words[at])(words + at + 2);
}
void Steps::do_all() {
    while (!empty()) do_first();
}

struct Counts : std::deque<int> {};
Groups::~Groups() { delete counts; }
void Groups::commit() {
    if (!counts) counts = new Counts;
    counts->push_back(std::exchange(open, 0));
}
void Groups::wait(int pending) {
    while (counts && static_cast<int>(counts->size()) > pending) {
        for (int i = 0; i < counts->front(); ++i) steps.do_first();
        counts->pop_front();
    }
}
bool Groups::committed() const {
    int count = 0;
    for (size_t i = 0; counts && i < counts->size(); ++i) count += (*counts)[i];
    return count > 0;
}

// --- threads and blocks ---

namespace {

constexpr int STACK = 128 << 10;
struct Stack {
    char bytes[STACK];
};
std::vector<std::unique_ptr<Stack>> stacks;  // that no thread has

// Values that the lanes of a warp hand in: for two meetings, for some lanes may be at the next one.
struct Warp {
    Meeting meetings[2];
};
struct Barrier {
    int arrived = 0, phase = 0;
};
struct HostThread : Thread {
    bool ended = false;
    Fiber fiber;
    std::unique_ptr<Stack> stack;

    explicit HostThread(void (*entry)()) {
        if (stacks.empty()) stacks.emplace_back(new Stack);
        stack = std::move(stacks.back());
        stacks.pop_back();
        fiber.prepare(stack->bytes, STACK, entry);
    }
    ~HostThread() { stacks.push_back(std::move(stack)); }
};
struct HostBlock : Block {
    std::vector<std::unique_ptr<HostThread>> threads;
    std::vector<Warp> warps;
    Barrier barriers[16];
    std::vector<unsigned char> shared;  // while another runs
};

Fiber scheduler;
size_t hurry;  // one in `hurry` copies to shared memory ends at once; 0: none
size_t lag;    // one in `lag` threads is passed over, so that lanes of a warp part; 0: none
std::minstd_rand dice;
void (*kernel)(const void*);
const void* arguments;

HostThread& host(Thread* t) { return *static_cast<HostThread*>(t); }
HostBlock& host(Block* b) { return *static_cast<HostBlock*>(b); }

void entry() {
    kernel(arguments);
    if (thread->copies.committed()) fail("copies on their way to memory that is the next block's");
    thread->stores.do_all();
    host(thread).ended = true, ++events;
    yield();
}

std::unique_ptr<HostBlock> begin(int index) {
    auto made = std::make_unique<HostBlock>();
    made->index = index, made->warps.resize(threads / 32);
    made->shared.assign(smem_bytes, 0xff);  // NaN, and -1
    for (int i = 0; i < threads; ++i) made->threads.emplace_back(new HostThread(entry))->index = i;
    return made;
}
void change_to(HostBlock* other) {
    if (block == other) return;
    if (block) std::copy_n(shared_memory, smem_bytes, host(block).shared.data());
    block = other;
    std::copy_n(other->shared.data(), smem_bytes, shared_memory);
}
// Lets each thread of the block run until it waits, but for those of some warps, and some others. Whether the block has not ended.
bool run_threads(uint32_t but_warps) {
    bool alive = false;
    for (auto& t : host(block).threads) {
        if (t->ended) continue;
        alive = true, thread = t.get();
        if (lag && dice() / 8 % lag == 0) continue;
        if (!(but_warps >> t->index / 32 % 32 & 1) && !(t->waits && t->waits(t->wait))) change(scheduler, t->fiber);
    }
    return alive;
}

}  // namespace

Thread* thread;
Block* block;
int threads, blocks;
unsigned char* shared_memory;
uint32_t smem_bytes;
uint64_t events;
Front front;

void yield() { change(host(thread).fiber, scheduler); }
void fail(const char* what, long long value) {
    std::fprintf(stderr, "thread %d of block %d: %s (%lld)\n", thread ? thread->index : -1, block->index, what, value);
    std::abort();
}
void arrive(int id, int count) {
    Barrier& barrier = host(block).barriers[id];
    ++events;
    if (WATCHES) release(id), step();
    if (WATCHES && barrier.arrived + 1 == count) complete(id, barrier.phase);
    if (++barrier.arrived == count) barrier.arrived = 0, ++barrier.phase;
}
void sync(int id, int count) {
    const Barrier& barrier = host(block).barriers[id];
    const int phase = barrier.phase;
    arrive(id, count);
    yield_while([&] { return barrier.phase == phase; });
    if (WATCHES) acquire(id, phase);
}
bool is_in_a_hurry() { return hurry && dice() / 8 % hurry == 0; }

Meeting& hand_in(const uint64_t* mine, int count) {
    Meeting& meeting = host(block).warps[thread->index / 32].meetings[thread->meetings++ % 2];
    std::copy_n(mine, count, meeting.words[thread->index % 32]);
    ++meeting.came, ++events;
    yield_while([&] { return meeting.came < 32; });
    return meeting;
}
void leave(Meeting& meeting) {
    if (++meeting.left == 32) meeting.came = meeting.left = 0;
}

bool run(const Launch& launch, void (*f)(const void*), const void* given) {
    constexpr int PATIENCE = 1 << 17;  // turns in which no block ends
    const uint32_t seed = launch.seed;
    blocks = launch.blocks, threads = launch.threads, smem_bytes = launch.smem_bytes, front = launch.front;
    shared_memory = launch.shared_memory, kernel = f, arguments = given, block = nullptr;
    mprotect(launch.pages + SHARED_PAGES, PAGE, PROT_NONE);
    std::minstd_rand random(seed);
    auto below = [&](size_t n) { return seed ? static_cast<size_t>(random()) / 8 % n : 0; };
    const size_t at_once = 1 + below(16), pace = 1 << below(7);
    hurry = below(3), lag = seed >> 16 ? 3 : 0, dice.seed(seed + 1);
    std::vector<std::unique_ptr<HostBlock>> begun;
    for (int next = 0, turns = 0, idle = 0; next < blocks || !begun.empty(); ++turns) {
        if (next < blocks && begun.size() < at_once && (begun.empty() || below(4) == 0))
            begun.push_back(begin(launch.last_first ? blocks - 1 - next : next)), ++next;
        const size_t chosen = below(begun.size());
        change_to(begun[chosen].get());
        const uint64_t before = events;
        const uint32_t but_warps = below(2) ? random() : 0;
        bool alive = true;
        for (uint64_t at = before - 1, rounds = 1 << (seed ? below(7) : 20); alive && rounds > 0 && events != at; --rounds)
            at = events, alive = run_threads(but_warps);
        if (!alive) {
            if (WATCHES) forget();
            begun.erase(begun.begin() + chosen), block = nullptr, turns = 0;
            continue;
        }
        idle = events == before ? idle + 1 : 0;
        if (idle && !block->in_flight.empty()) {
            block->in_flight.do_first();
            turns = 0;
        } else if (front && (below(pace) == 0 || idle > 256)) {
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

// --- CUDA's own functions of a warp ---

using emulator::meet;

int __syncthreads_or(int x) {
    int& any = emulator::block->any;
    any |= x != 0;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}
void __syncwarp() {
    const int barrier = 16 + emulator::thread->index / 32, phase = emulator::thread->meetings;
    if (WATCHES) emulator::release(barrier), emulator::step();
    emulator::align();
    if (WATCHES) emulator::complete(barrier, phase), emulator::acquire(barrier, phase);
}
uint64_t lane_bits(uint64_t x, int lane) {
    return meet<1>({x}, [=](auto& words, int) { return words[lane][0]; });
}
unsigned __ballot_sync(unsigned, int x) {
    return meet<1>({static_cast<uint64_t>(x != 0)}, [](auto& words, int) {
        unsigned ballot = 0;
        for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(words[i][0]) << i;
        return ballot;
    });
}
unsigned __reduce_add_sync(unsigned, unsigned x) {
    return meet<1>({x}, [](auto& words, int) {
        unsigned sum = 0;
        for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(words[i][0]);
        return sum;
    });
}
unsigned __reduce_max_sync(unsigned, unsigned x) {
    return meet<1>({x}, [](auto& words, int) {
        unsigned most = 0;
        for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<unsigned>(words[i][0]));
        return most;
    });
}

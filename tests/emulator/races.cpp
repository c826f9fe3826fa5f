// Finds accesses to shared memory that nothing orders, in whatever order threads have run, as FastTrack does (Flanagan and
// Freund 2009): each thread knows what comes before its next access, and barriers hand this on. Shuffles, votes and
// products hand on nothing: they do not order memory. This is for libraries that are compiled with -DWATCHES=1 and
// -fsanitize=thread, for which the compiler calls the functions at the end.
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <vector>

#include "block.h"

extern "C" { int emulator_races = 0; }  // two bytes each, as often as they were met

namespace emulator {
// The accesses of all lanes of a warp before `step`, and in it those of `lanes` before their next release.
struct Known {
    uint32_t step, lanes, releases;
    UNSEEN bool has(const Known& x) const {
        return x.step < step || (x.step == step && !(x.lanes & ~lanes) && x.releases <= releases);
    }
    UNSEEN void join(const Known& x) {
        if (x.step > step) *this = x;
        if (x.step == step) lanes |= x.lanes, releases = std::max(releases, x.releases);
    }
};
struct Knowledge {
    Known of[32] = {};  // warps
    UNSEEN void join(const Knowledge& other) {
        for (int i = 0; i < 32; ++i) of[i].join(other.of[i]);
    }
};
struct Actor : Knowledge {
    int warp;
    Known now;  // its next access
};
struct Handed {
    Knowledge next, last[2];  // of phases
    int phase = -1;
};
struct Write {
    Known known;
    int warp;
};
struct TwoBytes {
    Write writes[4];  // of the same value, by several warps
    int count;
    Known read[32];
    Mark mark;
    const void* code;
};
enum Kind { READ, WRITE, REWRITE };
struct Watched {
    TwoBytes* memory = static_cast<TwoBytes*>(std::calloc(smem_bytes, sizeof(TwoBytes) / 2));  // most is never touched
    std::vector<Actor> actors;
    std::map<uint64_t, Handed> barriers;
    Watched() {
        for (int i = 0; i < threads; ++i) {
            actors.push_back({{}, i / 32, {1, 1u << i % 32, 0}});
            actors[i].of[i / 32] = actors[i].now;
        }
    }
    ~Watched() { std::free(memory); }
};
static std::map<const Block*, Watched> blocks_watched;
static Watched& watched() { return blocks_watched[block]; }
static Actor& actor() { return watched().actors[thread->index]; }
static const char* name(const void* code) {
    Dl_info info{};
    return dladdr(code, &info) && info.dli_sname ? info.dli_sname : "?";
}
static void report(const char* what, size_t at, const TwoBytes& found, const void* code) {
    if (emulator_races++ < 50) std::fprintf(stderr, "byte %zu: %s %s by %s\n", at, name(code), what, name(found.code));
}
UNSEEN static void access(const void* p, size_t bytes, Kind kind, const void* code) {
    const size_t begin = static_cast<const unsigned char*>(p) - shared_memory;
    if (begin >= smem_bytes || !thread || !block) return;
    const Actor& by = actor();
    TwoBytes* memory = watched().memory;
    for (size_t at = begin; at + 2 <= begin + bytes; at += 2) {
        TwoBytes& x = memory[at / 2];
        if (x.mark == BARRIER) continue;
        if (x.mark == STARTS) report("meets a copy", at, x, code);
        int i = 0, known = 0;
        if (kind == REWRITE) {
            while (i < x.count && x.writes[i].warp != by.warp) ++i;
            if (i < x.count) x.writes[i].known.join(by.now);
            if (i == x.count && i < 4) x.writes[x.count++] = {by.now, by.warp};
            if (i < 4) continue;
        }
        for (const Write* write = x.writes; write < x.writes + x.count; ++write) known += by.of[write->warp].has(write->known);
        if (known < (kind == READ ? x.count > 0 : x.count)) report("does not know of the write", at, x, code);
        for (i = 0; kind != READ && i < 32; ++i)
            if (!by.of[i].has(x.read[i])) report("does not know of a read of the write", at, x, code);
        if (kind == READ)
            x.read[by.warp].join(by.now);
        else
            x.writes[0] = {by.now, by.warp}, x.count = 1, x.code = code;
    }
}
// Whether a value is there already: who writes it once more races with nobody.
UNSEEN static bool rewrites(uint32_t address, const void* value, int bytes) {
    if (std::memcmp(shared(address, bytes), value, bytes)) return false;
    access(shared_memory + address, bytes, REWRITE, __builtin_return_address(0));
    return true;
}
void mark(uint32_t address, int bytes, Mark mark) {
    const void *p = shared_memory + address, *code = __builtin_return_address(0);
    if (mark == STARTS) access(p, bytes, WRITE, code);
    for (int i = 0; i < bytes; i += 2) watched().memory[(address + i) / 2].mark = mark;
    if (mark == LANDS) access(p, bytes, WRITE, code);
}
void forget() { blocks_watched.erase(block); }
static void go_on(const Known& now) { actor().now = now, actor().of[actor().warp].join(now); }
void step() { go_on({actor().now.step + 1, actor().now.lanes, 0}); }
void release(uint64_t barrier) {
    watched().barriers[barrier].next.join(actor());
    go_on({actor().now.step, actor().now.lanes, actor().now.releases + 1});
}
void complete(uint64_t barrier, int phase) {
    Handed& handed = watched().barriers[barrier];
    if (std::exchange(handed.phase, phase) != phase) handed.last[phase & 1] = handed.next;
}
void acquire(uint64_t barrier, int phase) { actor().join(watched().barriers[barrier].last[phase & 1]); }
}  // namespace emulator

#define CALLED(name, kind, bytes, ...) \
    extern "C" UNSEEN void name(void* p, ##__VA_ARGS__) { emulator::access(p, bytes, emulator::kind, __builtin_return_address(0)); }
#define EACH(name, kind) CALLED(name##2, kind, 2) CALLED(name##4, kind, 4) CALLED(name##8, kind, 8) CALLED(name##16, kind, 16)
EACH(__tsan_read, READ) EACH(__tsan_unaligned_read, READ) EACH(__tsan_write, WRITE) EACH(__tsan_unaligned_write, WRITE)
CALLED(__tsan_read_range, READ, n, size_t n) CALLED(__tsan_write_range, WRITE, n, size_t n)
#define IGNORED(name) extern "C" void name() {}
IGNORED(__tsan_init) IGNORED(__tsan_read1) IGNORED(__tsan_write1) IGNORED(__tsan_vptr_update)

// For the kernels, which come behind this.
inline void watched_sts_128(uint32_t address, float4 v) {
    if (!emulator::rewrites(address, &v, 16)) sts_128(address, v);
}
#define sts_128 watched_sts_128

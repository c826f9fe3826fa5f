// The PTX instructions of sm_90a that the kernels use, one a function: TMA, mbarriers, wgmma,
// register reallocation.
#pragma once
#include "ptx.cuh"

// A CUtensorMap: what TMA knows of a tensor. cufa/launch/tensor_map.py encodes it.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// A member of the kernel's parameter, read again at each call, like block_index().
__device__ inline float reread_parameter(const float& x) {
    float y;
    asm volatile("ld.param.f32 %0, [%1];" : "=f"(y) : "l"(__cvta_generic_to_grid_constant(&x)));
    return y;
}

// The bytes of dynamic shared memory that the launch gave.
__device__ inline uint32_t dynamic_smem_bytes() {
    uint32_t n;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(n));
    return n;
}

// Barriers in shared memory that count arrivals of threads and bytes of copies. A wait names the
// parity of the phase.
__device__ inline void mbarrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
__device__ inline bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, "
        "0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}
// With BOUNDED_WAITS, for tests, a wait that does not end stops the kernel with an error.
__device__ inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
#ifdef BOUNDED_WAITS
    for (int tries = 0; !mbarrier_try_wait(bar, parity); ++tries)
        if (tries == 1 << 22) __trap();
#else
    while (!mbarrier_try_wait(bar, parity)) {
    }
#endif
}

// Fetches what TMA is about to ask a tensor map for.
__device__ inline void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies a box of a five-dimensional tensor, whose innermost coordinate is c0, to shared memory;
// what lies outside the tensor is zero. The bytes count at the barrier. `policy`: how L2 keeps what
// is read, see ptx.cuh.
__device__ inline void tma_load(uint32_t smem, const TensorMap& map, uint32_t bar, int c0, int c1,
                                int c2, int c3, int c4, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::"
        "cache_hint [%0], [%1, {%3, "
        "%4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
        "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
        : "memory");
}
// The other way; what lies outside the tensor is not written.
__device__ inline void tma_store(const TensorMap& map, uint32_t smem, int c0, int c1, int c2,
                                 int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
        "[%1];" ::"l"(&map),
        "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
__device__ inline void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the stores have read shared memory.
__device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Makes this thread's writes to shared memory visible to TMA.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int REGISTERS>
__device__ inline void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ inline void stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ inline uint64_t wgmma_descriptor(uint32_t low, uint32_t high) {
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high));
    return d;
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma.mma_async, m64 nN k16, float32 accumulators: d[i] are the columns 8 i .. 8 i + 7. D = A B,
// or D += A B. ss: A and B in shared memory, K along the columns of both. rs: A in registers, B in
// shared memory, K along its rows. A statement does one step of K, or two: each statement hands on
// all accumulators, which takes the compiler time.
template <class T, int N>
struct Wgmma;

// The accumulators' names in the instruction (L) and as operands (R), eight for each 16 columns.
#define L1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L2 L1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L3 L2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define L4 L3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define L5 L4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L6 L5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L7 L6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define L8 L7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define L9 L8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define L10 L9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define L11 L10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define L12 L11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define L13 L12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define L14 L13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define L15 L14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define L16 L15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define R1(i)                                                                      \
    "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), "+f"(d[i + 1][0]), \
        "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), "+f"(d[i + 1][3])
#define R2 R1(0), R1(2)
#define R3 R2, R1(4)
#define R4 R3, R1(6)
#define R5 R4, R1(8)
#define R6 R5, R1(10)
#define R7 R6, R1(12)
#define R8 R7, R1(14)
#define R9 R8, R1(16)
#define R10 R9, R1(18)
#define R11 R10, R1(20)
#define R12 R11, R1(22)
#define R13 R12, R1(24)
#define R14 R13, R1(26)
#define R15 R14, R1(28)
#define R16 R15, R1(30)

// p: whether the first step adds to D; q: that the second one does.
#define PREDICATES(ACCUMULATE) \
    "{\n.reg .pred p, q;\nsetp.ne.b32 p, %" ACCUMULATE ", 0;\nsetp.eq.b32 q, 0, 0;\n"
#define STEP(N, NAME, G, OPERANDS) \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" L##G "}, " OPERANDS ";\n"
#define WGMMA(TYPE, NAME, N, G, X0, X1, X2, X3, X4, X5, X6, X7, X8, X9, X10)                       \
    template <>                                                                                    \
    struct Wgmma<TYPE, N> {                                                                        \
        static __device__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {  \
            asm volatile(PREDICATES(X2) STEP(N, NAME, G, "%" X0 ", %" X1 ", p, 1, 1, 0, 0") "}"    \
                         : R##G                                                                    \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
        static __device__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2,       \
                                  uint64_t b2, int accumulate) {                                   \
            asm volatile(PREDICATES(X4) STEP(N, NAME, G, "%" X0 ", %" X1 ", p, 1, 1, 0, 0")        \
                             STEP(N, NAME, G, "%" X2 ", %" X3 ", q, 1, 1, 0, 0") "}"               \
                         : R##G                                                                    \
                         : "l"(a), "l"(b), "l"(a2), "l"(b2), "r"(accumulate));                     \
        }                                                                                          \
        static __device__ void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,        \
                                  int accumulate) {                                                \
            asm volatile(                                                                          \
                PREDICATES(X5)                                                                     \
                    STEP(N, NAME, G, "{%" X0 ",%" X1 ",%" X2 ",%" X3 "}, %" X4 ", p, 1, 1, 1") "}" \
                : R##G                                                                             \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));            \
        }                                                                                          \
        static __device__ void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,        \
                                  const uint32_t (&a2)[4], uint64_t b2, int accumulate) {          \
            asm volatile(                                                                          \
                PREDICATES(X10) STEP(N, NAME, G,                                                   \
                                     "{%" X0 ",%" X1 ",%" X2 ",%" X3 "}, %" X4 ", p, 1, 1, 1")     \
                    STEP(N, NAME, G, "{%" X5 ",%" X6 ",%" X7 ",%" X8 "}, %" X9 ", q, 1, 1, 1") "}" \
                : R##G                                                                             \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(a2[0]), "r"(a2[1]),      \
                  "r"(a2[2]), "r"(a2[3]), "l"(b2), "r"(accumulate));                               \
        }                                                                                          \
    };
// X0 and on are the names of the operands after them.
#define WGMMA_BOTH(...) WGMMA(float16, "f16", __VA_ARGS__) WGMMA(bfloat16, "bf16", __VA_ARGS__)
WGMMA_BOTH(32, 2, "16", "17", "18", "19", "20", "21", "22", "23", "24", "25", "26")
WGMMA_BOTH(48, 3, "24", "25", "26", "27", "28", "29", "30", "31", "32", "33", "34")
WGMMA_BOTH(64, 4, "32", "33", "34", "35", "36", "37", "38", "39", "40", "41", "42")
WGMMA_BOTH(80, 5, "40", "41", "42", "43", "44", "45", "46", "47", "48", "49", "50")
WGMMA_BOTH(96, 6, "48", "49", "50", "51", "52", "53", "54", "55", "56", "57", "58")
WGMMA_BOTH(112, 7, "56", "57", "58", "59", "60", "61", "62", "63", "64", "65", "66")
WGMMA_BOTH(128, 8, "64", "65", "66", "67", "68", "69", "70", "71", "72", "73", "74")
WGMMA_BOTH(144, 9, "72", "73", "74", "75", "76", "77", "78", "79", "80", "81", "82")
WGMMA_BOTH(160, 10, "80", "81", "82", "83", "84", "85", "86", "87", "88", "89", "90")
WGMMA_BOTH(176, 11, "88", "89", "90", "91", "92", "93", "94", "95", "96", "97", "98")
WGMMA_BOTH(192, 12, "96", "97", "98", "99", "100", "101", "102", "103", "104", "105", "106")
WGMMA_BOTH(256, 16, "128", "129", "130", "131", "132", "133", "134", "135", "136", "137", "138")
#undef PREDICATES
#undef STEP
#undef WGMMA
#undef WGMMA_BOTH
#undef L1
#undef L2
#undef L3
#undef L4
#undef L5
#undef L6
#undef L7
#undef L8
#undef L9
#undef L10
#undef L11
#undef L12
#undef L13
#undef L14
#undef L15
#undef L16
#undef R1
#undef R2
#undef R3
#undef R4
#undef R5
#undef R6
#undef R7
#undef R8
#undef R9
#undef R10
#undef R11
#undef R12
#undef R13
#undef R14
#undef R15
#undef R16

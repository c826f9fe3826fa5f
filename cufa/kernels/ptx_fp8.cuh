// Instructions of sm_90a for 8-bit floating point: wgmma, one a function.
#pragma once
#include "ptx_e4m3.cuh"
#include "ptx_sm90.cuh"

// e4m3: a sign, four bits of exponent and three of mantissa. From 2^-9 to 448, NaN, no infinity.
struct float8 {
    unsigned char bits;
};

// Reads a float that nobody writes, at this place of the program: the compiler moves other reads to
// where they are used, and waits there.
__device__ inline float load_early(const float* p) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}

// As in ptx.cuh.
__device__ inline void computed_here(float& x) { asm volatile("mov.b32 %0, %0;" : "+f"(x)); }

// mma.sync of e4m3, which a warp executes alone: two bytes stand for a number of 16 bits.
template <>
__device__ inline void mma_m16n8k16<float8>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// wgmma of e4m3: 32 steps of K at once, along the columns of both operands. The sums have about 14
// bits, less than float32's 24.
#define L32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define L64 L32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define L96 L64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define L128 L96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define L160 L128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define L192 L160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define L224 L192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define L256 L224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define R8(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define R32(i) R8(i), R8(i + 1), R8(i + 2), R8(i + 3)
#define R64 R32(0), R32(4)
#define R96 R64, R32(8)
#define R128 R96, R32(12)
#define R256 R128, R32(16), R32(20), R32(24), R32(28)

// p: whether the first step adds to D; q: that the second one does.
#define PREDICATES(ACCUMULATE) \
    "{\n.reg .pred p, q;\nsetp.ne.b32 p, %" ACCUMULATE ", 0;\nsetp.eq.b32 q, 0, 0;\n"
#define STEP(N, OPERANDS, PREDICATE)                                                 \
    "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" L##N "}, " OPERANDS \
                                                                      ", " PREDICATE ", 1, 1;\n"
#define WGMMA(N, RN, X0, X1, X2, X3, X4, X5)                                                      \
    template <>                                                                                   \
    struct Wgmma<float8, N> {                                                                     \
        static __device__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) { \
            asm volatile(PREDICATES(X2) STEP(N, "%" X0 ", %" X1, "p") "}"                         \
                         : RN                                                                     \
                         : "l"(a), "l"(b), "r"(accumulate));                                      \
        }                                                                                         \
        static __device__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2,      \
                                  uint64_t b2, int accumulate) {                                  \
            asm volatile(PREDICATES(X4) STEP(N, "%" X0 ", %" X1, "p")                             \
                             STEP(N, "%" X2 ", %" X3, "q") "}"                                    \
                         : RN                                                                     \
                         : "l"(a), "l"(b), "l"(a2), "l"(b2), "r"(accumulate));                    \
        }                                                                                         \
        static __device__ void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,       \
                                  int accumulate) {                                               \
            asm volatile(PREDICATES(X5)                                                           \
                             STEP(N, "{%" X0 ",%" X1 ",%" X2 ",%" X3 "}, %" X4, "p") "}"          \
                         : RN                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));  \
        }                                                                                         \
    };
// X0 and on are the names of the operands after the accumulators.
WGMMA(32, R32(0), "16", "17", "18", "19", "20", "21")
WGMMA(64, R64, "32", "33", "34", "35", "36", "37")
WGMMA(96, R96, "48", "49", "50", "51", "52", "53")
WGMMA(128, R128, "64", "65", "66", "67", "68", "69")
WGMMA(256, R256, "128", "129", "130", "131", "132", "133")
#undef PREDICATES
#undef STEP
#undef WGMMA
#undef L32
#undef L64
#undef L96
#undef L128
#undef L160
#undef L192
#undef L224
#undef L256
#undef R8
#undef R32
#undef R64
#undef R96
#undef R128
#undef R256

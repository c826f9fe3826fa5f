// Operands of 8 bits, and the constants that follow from the template arguments of fp8_wgmma.cu.
#pragma once
#include "fa3_config.cuh"
#include "ptx_fp8.cuh"

// Scales of blocks of 2^block_log2 rows: an array (batch, heads, blocks) whose step from head to
// head is `stride`; with a stride of 0, one scale for all. `head` counts the heads of all batches.
struct Scales {
    const float* data;
    int stride, block_log2;

    __device__ const float* of(int head, int row) const {
        return data + static_cast<long long>(head) * stride + (row >> block_log2);
    }
};

// (batch, heads, seq, dim) tensors of 8 bits, with the sequences of a WAY of kv.cuh. V is stored as
// VTile8 says. Packed sequences follow each other in O; in Q, K and V each begins a new block, see
// cufa/quantized/sequences.py.
template <class WAY>
struct Quantized : WAY {
    static constexpr int ROWS = 128;  // of a block
    Scales scales_q, scales_k, scales_v;

    // The sequence, with the numbers of its first rows in Q and in K.
    template <class Arguments>
    static __device__ Sequence sequence(const Arguments& p, int batch, int q0) {
        Sequence found = WAY::sequence(p, batch, q0);
        if constexpr (WAY::RAGGED) {
            found.first_q = (found.first_q / ROWS + batch) * ROWS;
            found.first_k = (found.first_k / ROWS + batch) * ROWS;
        }
        return found;
    }
    // The same, with the number of its first row in O.
    template <class Arguments>
    static __device__ Sequence sequence_of_result(const Arguments& p, int batch) {
        return WAY::sequence(p, batch, 0);
    }
};

// V transposed, in blocks of 128 keys, as wgmma needs it: a row of the tile is a column of V, and
// keys, over which P V sums, lie along it. In memory, each block is a tile of 128-byte rows. Within
// 16 keys the order is that in which a thread holds P: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. So
// P is an operand as it is. The 16 pairs of each 32 columns are in the order 0 4 8 12, 1 5 9 13, 2
// 6 10 14, 3 7 11 15. wgmma gives a thread every fourth of these: its four pairs are neighbours in
// O. TMA and the swizzle take two bytes as one element.
template <int HEAD_DIM>
struct VTile8 : WgmmaTile<HEAD_DIM, 64> {
    using Tile = WgmmaTile<HEAD_DIM, 64>;
    static constexpr int KEYS = 128;

    static __device__ void load(uint32_t tile, int, const TensorMap& map, uint32_t bar, int key,
                                int head, int batch, unsigned long long policy) {
        // For keys far behind the last, the row may wrap to a negative number. TMA finds no rows
        // there, either.
        const unsigned row = static_cast<unsigned>(key / KEYS) * HEAD_DIM;
        tma_load(tile, map, bar, 0, 0, static_cast<int>(row), head, batch, policy);
    }
    // Zeroes a chunk of 16 keys from the one with the number `keys` on.
    static __device__ void keep(uint32_t chunk, int keys) {
        uint64_t halves[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            halves[i] = lds_64(chunk + 8 * i);
#pragma unroll
            for (int byte = 0; byte < 8; ++byte) {
                const int key = byte / 2 % 2 * 8 + (2 * i + byte / 4) * 2 + byte % 2;
                if (key >= keys) halves[i] &= ~(0xffull << 8 * byte);
            }
        }
        sts_128(chunk,
                make_float4(low(halves[0]), high(halves[0]), low(halves[1]), high(halves[1])));
    }
    // The operand of the i-th piece of COLUMNS columns of O.
    template <int COLUMNS>
    static __device__ uint32_t piece(uint32_t operand, int i) {
        return operand + (i * COLUMNS * Tile::ROW_BYTES >> 4);
    }

 private:
    static __device__ float low(uint64_t x) { return __uint_as_float(static_cast<uint32_t>(x)); }
    static __device__ float high(uint64_t x) { return low(x >> 32); }
};

// The base is in fa3_wgmma's terms: two bytes count as one element of its tiles. O does not leave
// through shared memory.
template <class OUT_, int HEAD_DIM_, int HEAD_DIM_V_, int BM_, int BN_, int STAGES_,
          bool PING_PONG_, class SCORE_, class KV_>
struct Config8 : Config<float8, HEAD_DIM_ / 2, HEAD_DIM_V_ / 2, BM_, BN_, STAGES_, 1, PING_PONG_,
                        Plain, SCORE_, KV_> {
    using OUT = OUT_;
    using VTile = VTile8<HEAD_DIM_V_>;
    static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
    static_assert(BN_ == VTile::KEYS, "a tile of keys has one scale");
    // O += P V is computed in pieces of PIECE columns, IN_FLIGHT at once. Their sums take the
    // registers of S.
    static constexpr int PIECE = HEAD_DIM_V < 128 ? HEAD_DIM_V : 64, PIECES = HEAD_DIM_V / PIECE;
    static constexpr int IN_FLIGHT = PIECES < 2 ? PIECES : 2;
    static_assert(HEAD_DIM_V % PIECE == 0, "whole pieces");
    static_assert(!Config8::Pairs::BYTES && !SCORE_::NATURAL, "scores in log2 units");
    static_assert(Config8::ACROSS, "Q needs two slots");
    static constexpr bool O_FROM_REGISTERS = true, ALL_FREE_Q = true;
    static constexpr bool FOLDED = false;
};

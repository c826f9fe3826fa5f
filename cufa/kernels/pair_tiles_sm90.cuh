// Biases and masks, which have a number for each query and key, on their way to the warps of
// fa3_wgmma.cu. The accumulators' layout leaves a lane two neighbouring keys of a row at a time,
// eight rows an instruction: read so from global memory, these numbers take the load units four
// times as long as the products take the tensor cores. So each warp copies its 16 rows of the next
// keys to shared memory, in whole chunks and asynchronously, while it works on the present ones.
#pragma once
#include "ptx_convert.cuh"
#include "ptx_sm90.cuh"
#include "score.cuh"

// A warp's rows of BN keys of an array, as they lie in shared memory: where each row is in global
// memory, and its elements. KEYS: how many keys an element stands for, 1, or 8 of a byte.
template <class T, int KEYS, int BN>
struct PairRows {
    static constexpr int ROWS = 16, SIZE = sizeof(T);
    static constexpr int PIECE = KEYS == 1 ? 16 : 4;  // bytes that are copied at once
    static constexpr int ROW_BYTES =
        (BN / KEYS * SIZE + PIECE - 1) / PIECE * PIECE;  // bits may begin within a piece
    static constexpr int POINTERS = ROWS * 8;
    static constexpr int BYTES = POINTERS + (ROWS * ROW_BYTES + 127) / 128 * 128;

    // UNIT bytes, which one access takes from a row, are permuted by XOR with the row's number, so
    // that the rows of an access lie in different banks.
    static constexpr int UNIT = SIZE == 4 ? 32 : 16, UNITS = ROW_BYTES / UNIT,
                         OF_BANKS = 128 / UNIT;
    static constexpr int PANEL = KEYS > 1 || UNITS % 2 ? 1
                                 : UNITS % 4           ? 2
                                 : UNITS % OF_BANKS    ? 4
                                                       : OF_BANKS;
    static constexpr __device__ int swizzle(int row) {
        return row / (OF_BANKS / PANEL) % PANEL * UNIT;
    }
    static __device__ uint32_t offset(int row, int byte) {
        return POINTERS + row * ROW_BYTES + (byte ^ swizzle(row));
    }
    // The place `rows` rows and `bytes` bytes on from one in a row below a power of two, which
    // `rows` is a multiple of, and in the first `bytes` of the unit.
    static __device__ uint32_t advance(uint32_t place, int rows, int bytes) {
        const int panel = bytes % (PANEL * UNIT) / UNIT * UNIT;
        return (place ^ (panel ^ swizzle(rows))) + rows * ROW_BYTES + bytes - panel;
    }

    // Looks up where the rows of a tile begin. Rows beyond the sequence are read as its last one.
    template <class At>
    static __device__ void aim(uint32_t tile, const OfPairs<T>& array, const Sequence& sequence,
                               const At& at) {
        if (at.lane >= ROWS) return;
        const int row = at.row + at.lane;
        const Pair pair{sequence, at.batch, at.head_of(row),
                        min(at.query_of(row), sequence.seq_q - 1), 0};
        sts_64(tile + at.lane * 8, reinterpret_cast<uint64_t>(array.row(pair)));
    }

    // Starts the copy of BN keys from `key` on; if WHOLE, all exist. Zeros stand for keys that do
    // not.
    template <bool WHOLE>
    static __device__ void fill(uint32_t tile, const OfPairs<T>& array, int key, int seq_kv) {
        const int lane = reread_thread_index() % 32;
        const int first = key / KEYS, count = elements<WHOLE>(first, seq_kv);
        constexpr int PIECES = ROW_BYTES / PIECE;
        constexpr int STEP = PIECES > 16  ? 1
                             : PIECES > 8 ? 2
                             : PIECES > 4 ? 4
                             : PIECES > 2 ? 8
                                          : 16;  // rows at once
        constexpr int LANES = 32 / STEP;         // of a row
        const int before = first * SIZE % PIECE, row = lane / LANES;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += LANES) {
            const int byte = (piece + lane % LANES) * PIECE;
            if (PIECES % LANES && byte >= ROW_BYTES) break;
            const long long from = static_cast<long long>(first) * SIZE - before + byte;
            const int bytes =
                WHOLE && KEYS == 1 ? PIECE : min(max(count * SIZE + before - byte, 0), PIECE);
            const uint32_t to = tile + offset(row, byte);
            constexpr int AT_ONCE = ROWS / STEP < 2 ? 1 : 2;
#pragma unroll
            for (int i = 0; i < ROWS; i += STEP * AT_ONCE) {
                uint64_t rows[AT_ONCE];
#pragma unroll
                for (int e = 0; e < AT_ONCE; ++e) rows[e] = lds_64(tile + (row + i + STEP * e) * 8);
#pragma unroll
                for (int e = 0; e < AT_ONCE; ++e)
                    cp_async<PIECE>(advance(to, i + STEP * e, 0), rows[e] + from, bytes);
            }
        }
    }
    // Whether rows can be copied so: all begin with whole pieces, and their elements follow each
    // other.
    static __device__ bool lies_in_pieces(const OfPairs<T>& array) {
        const uint64_t strides = array.stride_batch | array.stride_head | array.stride_query;
        return array.stride_key == 1 &&
               (reinterpret_cast<uint64_t>(array.data) | strides * SIZE) % PIECE == 0;
    }
    // How many elements of a row there are from the `first` on, BN keys at most.
    template <bool WHOLE>
    static __device__ int elements(int first, int seq_kv) {
        return WHOLE ? BN / KEYS : min((seq_kv + KEYS - 1) / KEYS - first, BN / KEYS);
    }
    // The same for other arrays, element by element: neighbouring lanes copy elements that are
    // neighbours in memory.
    template <bool WHOLE>
    static __device__ void fill_by_elements(uint32_t tile, const OfPairs<T>& array, int key,
                                            int seq_kv) {
        constexpr int COLS = BN / KEYS, AT_ONCE = KEYS == 1 ? 8 : ROWS * COLS / 32;
        static_assert(ROWS * COLS % (32 * AT_ONCE) == 0, "all at once are there");
        const int lane = reread_thread_index() % 32;
        const int first = key / KEYS, count = elements<WHOLE>(first, seq_kv);
        const bool by_rows = array.stride_key > array.stride_query;
        const int before = first * SIZE % PIECE;
#pragma unroll 1
        for (int i = lane; i < ROWS * COLS; i += 32 * AT_ONCE) {
            T elements[AT_ONCE];
            int places[AT_ONCE];
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e) {
                const int n = i + 32 * e;
                const int row = by_rows ? n % ROWS : n / COLS,
                          column = by_rows ? n / ROWS : n % COLS;
                const T* from = reinterpret_cast<const T*>(lds_64(tile + row * 8)) +
                                (first + column) * array.stride_key;
                const bool is_there = WHOLE || column < count;
                places[e] = tile + offset(row, before + column * SIZE);
                if constexpr (SIZE == 4)
                    cp_async<4>(places[e], reinterpret_cast<uint64_t>(from), is_there ? 4 : 0);
                else
                    elements[e] = is_there ? *from : T{};
            }
            if constexpr (SIZE < 4) {
#pragma unroll
                for (int e = 0; e < AT_ONCE; ++e) sts(places[e], elements[e]);
            }
        }
    }
};

// The tile of a part of the score in shared memory: nothing, for parts that read no such array.
template <class Part, int BN>
struct PairTile {
    static constexpr int BYTES = 0;
};
template <class T, int BN>
struct PairTile<Bias<T>, BN> : PairRows<T, 1, BN> {
    using Rows = PairRows<T, 1, BN>;
    static __device__ const OfPairs<T>& array(const Bias<T>& part) { return part.bias; }

    // S factor + bias, in natural units.
    static __device__ void add(uint32_t tile, float (&rS)[1][BN / 8][4], float factor) {
        const int lane = reread_thread_index() % 32;
        auto add = [&](float& s, float bias) { s = fmaf(s, factor, bias); };
        if constexpr (sizeof(T) == 2) {  // 8x8 matrices are as the accumulators are
            const uint32_t from = tile + Rows::offset(lane % 16, lane / 16 * 16);
#pragma unroll
            for (int nt = 0; nt < BN / 8; nt += 2) {
                uint32_t r[4];
                ldmatrix_x4(r, Rows::advance(from, 0, nt * 16));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float* s = &rS[0][nt + i / 2][i % 2 * 2];
                    add(s[0], low_to_float<T>(r[i])), add(s[1], high_to_float<T>(r[i]));
                }
            }
        } else {
            const uint32_t from = tile + Rows::offset(lane / 4, lane % 4 * 8);
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) {
                const float2 bias = lds_2(Rows::advance(from, i % 2 * 8, i / 2 * 32));
                float* s = &rS[0][i / 2][i % 2 * 2];
                add(s[0], bias.x), add(s[1], bias.y);
            }
        }
    }
};
template <int BN>
struct PairTile<Mask, BN> : PairRows<unsigned char, 1, BN> {
    using Rows = PairRows<unsigned char, 1, BN>;
    static __device__ const OfPairs<unsigned char>& array(const Mask& part) { return part.mask; }

    static __device__ void hide(uint32_t tile, float (&rS)[1][BN / 8][4], int) {
        const int lane = reread_thread_index() % 32;
        const uint32_t from = tile + Rows::offset(lane / 4, lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {
            const uint32_t two = lds_16(Rows::advance(from, i % 2 * 8, i / 2 * 8));
            float* s = &rS[0][i / 2][i % 2 * 2];
            set_if_equal(s[0], two & 0xff, 0, -INF), set_if_less(s[1], two, 0x100, -INF);
        }
    }
};
template <int BN>
struct PairTile<MaskBits, BN> : PairRows<unsigned char, 8, BN> {
    using Rows = PairRows<unsigned char, 8, BN>;
    static __device__ const OfPairs<unsigned char>& array(const MaskBits& part) {
        return part.mask;
    }

    static __device__ void hide(uint32_t tile, float (&rS)[1][BN / 8][4], int key) {
        const int lane = reread_thread_index() % 32;
        const uint32_t from = tile + Rows::offset(lane / 4, key / 8 % Rows::PIECE);
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) {
            // Bits of sixteen keys; the lane's are then the two highest bits of each byte.
            const uint32_t bits = lds_16(Rows::advance(from, i % 2 * 8, i / 2 * 2)) << lane % 4 * 2;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                set_if_equal(rS[0][i / 2 * 2 + e / 2][i % 2 * 2 + e % 2],
                             bits & (e / 2 ? 0x8000 : 0x80) >> e % 2, 0, -INF);
        }
    }
};

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

// The tiles of all parts that have any, one after the other from `place` on, a warp's own.
template <class SCORE, int BN>
struct PairTiles;
template <class... Parts, int BN>
struct PairTiles<Score<Parts...>, BN> {
    template <class Part>
    static constexpr bool HAS = PairTile<Part, BN>::BYTES > 0;
    static constexpr int BYTES = (0 + ... + PairTile<Parts, BN>::BYTES);
    uint32_t place;

    // Whether sequences share the arrays, and heads do not: the same heads of all sequences then
    // belong together.
    __device__ bool belong_to_heads(const Score<Parts...>& score) const {
        long long of_batch = 0, of_head = 0;
        auto look = [&](auto of, const auto& part, uint32_t) {
            of_batch |= of.array(part).stride_batch, of_head |= of.array(part).stride_head;
        };
        each(look, score);
        return of_batch == 0 && of_head != 0;
    }

    // Takes up a tile of rows.
    template <class At>
    __device__ void aim(const Score<Parts...>& score, const Sequence& sequence,
                        const At& at) const {
        each([&](auto of, const auto& part,
                 uint32_t tile) { of.aim(tile, of.array(part), sequence, at); },
             score);
        __syncwarp();
    }
    // Starts to copy the keys from `key` on; those before have been used.
    template <bool WHOLE>
    __device__ void fill(const Score<Parts...>& score, int key, int seq_kv = 0) const {
        __syncwarp();
        auto start = [&](auto of, const auto& part, uint32_t tile) {
            if (of.lies_in_pieces(of.array(part)))
                of.template fill<WHOLE>(tile, of.array(part), key, seq_kv);
        };
        each(start, score);
        cp_async_commit();
    }
    // The same for arrays that cannot be copied so; it takes some registers.
    template <bool WHOLE>
    __device__ void fill_others(const Score<Parts...>& score, int key, int seq_kv = 0) const {
        auto copy = [&](auto of, const auto& part, uint32_t tile) {
            if (!of.lies_in_pieces(of.array(part)))
                of.template fill_by_elements<WHOLE>(tile, of.array(part), key, seq_kv);
        };
        each(copy, score);
        cp_async_commit();
    }
    __device__ void wait() const {
        cp_async_wait<0>();
        __syncwarp();
    }
    template <class Part>
    __device__ void add(float (&rS)[1][BN / 8][4], float factor) const {
        PairTile<Part, BN>::add(of<Part>(), rS, factor);
    }
    template <class Part>
    __device__ void hide(float (&rS)[1][BN / 8][4], int key) const {
        PairTile<Part, BN>::hide(of<Part>(), rS, key);
    }

 private:
    template <class Part>
    __device__ uint32_t of() const {
        uint32_t tile = place;
        bool before = true;
        ((before = before && !IS_SAME<Part, Parts>,
          tile += before ? PairTile<Parts, BN>::BYTES : 0),
         ...);
        return tile;
    }
    template <class F>
    __device__ void each(F f, const Score<Parts...>& score) const {
        (with<Parts>(f, score), ...);
    }
    template <class Part, class F>
    __device__ void with(F& f, const Part& part) const {
        if constexpr (HAS<Part>) f(PairTile<Part, BN>(), part, of<Part>());
    }
};

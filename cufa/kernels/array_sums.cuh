// Gradients of arrays that parts of a score read: sums in float32, to which all blocks add.
#pragma once
#include "part.cuh"
#include "ptx.cuh"
#include "ptx_reduce.cuh"

// The I-th place at which a part reads an array. A part that adds up gradients has the number of
// such places, SUMS, and of each:
// - BY_QUERY, BY_KEY: whether the element depends on the query, and on the key;
// - partial(Read<I>, s, pair): the derivative of `score` by the element;
// - place(Read<I>, s, pair): where the gradient of the element is added up.
// COLLIDES: whether several threads of a block may add to one number.
template <int I>
struct Read {};

template <class Part, class = void>
struct Sums {
    static constexpr int COUNT = 0;
    static constexpr bool COLLIDES = false;
};
template <class Part>
struct Sums<Part, decltype(Part::SUMS, void())> {
    static constexpr int COUNT = Part::SUMS;
    static constexpr bool COLLIDES = Part::COLLIDES;
};

// A part of scores whose sums have a fixed order: the blocks of a chain add one after the other, in
// the order in which they begin. From a block to the next one along an axis, its chain and its rank
// there grow by these; and its rank from one block to the next one that begins.
struct InTurn : Part<InTurn> {
    int* chains;  // how many blocks of each have ended
    int chain_batch, chain_head, chain_key, rank_batch, rank_head, rank_number;

    __device__ void begin(int batch, int head_kv, int key_tile, int number) const {
        if (thread_index() == 0) {
            const int* ended = chain(batch, head_kv, key_tile);
            const int rank = this->rank(batch, head_kv, number);
            while (ld_acquire(ended) != rank) {
            }
        }
        __syncthreads();
    }
    __device__ void end(int batch, int head_kv, int key_tile, int number) const {
        fence_gpu();
        __syncthreads();
        if (thread_index() == 0)
            st_release(chain(batch, head_kv, key_tile), rank(batch, head_kv, number) + 1);
    }

 private:
    __device__ int* chain(int batch, int head_kv, int key_tile) const {
        return chains + batch * chain_batch + head_kv * chain_head + key_tile * chain_key;
    }
    __device__ int rank(int batch, int head_kv, int number) const {
        return batch * rank_batch + head_kv * rank_head + number * rank_number;
    }
};
template <class Part>
inline constexpr bool IS_IN_TURN = false;
template <>
inline constexpr bool IS_IN_TURN<InTurn> = true;

// Adds a number of each lane. All lanes of a warp call it.
template <bool COLLIDES, bool IN_TURN>
__device__ void add_to_sums(float* place, float x) {
    if constexpr (!COLLIDES) {
        if (x != 0.f) red_add(place, x);
    } else {
        const uint64_t address = reinterpret_cast<uint64_t>(place);
        const int lane = thread_index() % 32;
        if (__all_sync(0xffffffff, address == __shfl_sync(0xffffffff, address, 0))) {
            x = lanes_sum<32>(x);
            if (lane == 0 && x != 0.f) red_add(place, x);
        } else if constexpr (IN_TURN) {
            int left = lanes_before_with(address);  // that add to the same number
            while (__any_sync(0xffffffff, left >= 0)) {
                if (left-- == 0 && x != 0.f) red_add(place, x);
                __syncwarp();
            }
        } else {
            if (x != 0.f) red_add(place, x);
        }
        if (IN_TURN) __syncwarp();
    }
}

// The sums of a warp for one place at which a part reads. What does not depend on the query, or on
// the key, is added up in registers first.
template <class Part, int I, int MT, int NT, bool IN_TURN>
struct SumsOfRead {
    static constexpr bool BY_QUERY = Part::BY_QUERY[I], BY_KEY = Part::BY_KEY[I];
    static constexpr bool OF_PAIRS = BY_QUERY && BY_KEY;
    static constexpr int KEYS = BY_KEY && !BY_QUERY ? MT * 2 : 1,
                         QUERIES = BY_QUERY && !BY_KEY ? NT * 2 : 1;
    float sums[KEYS][QUERIES] = {};

    // Adds dS of a pair; `key` and `query` count those of the thread.
    __device__ void add(const Part& part, float dS, float s, const Pair& pair, int key, int query) {
        const float x = dS == 0.f ? 0.f : dS * part.partial(Read<I>(), s, pair);
        if constexpr (OF_PAIRS)
            put(part.place(Read<I>(), s, pair), x);
        else
            sums[KEYS > 1 ? key : 0][QUERIES > 1 ? query : 0] += x;
    }
    // Behind all pairs of a tile; pair(key, query) is one of the thread.
    template <class PairOf>
    __device__ void end(const Part& part, const PairOf& pair) {
        if constexpr (!OF_PAIRS) {
            const int lane = thread_index() % 32;
            const bool adds = (BY_QUERY || lane % 4 == 0) && (BY_KEY || lane / 4 == 0);
#pragma unroll
            for (int key = 0; key < KEYS; ++key)
#pragma unroll
                for (int query = 0; query < QUERIES; ++query) {
                    float x = sums[key][query];
                    if (!BY_QUERY) x = lanes_sum<4>(x);
#pragma unroll
                    for (int i = BY_KEY ? 32 : 4; i < 32; i *= 2)
                        x += __shfl_xor_sync(0xffffffff, x, i);
                    put(part.place(Read<I>(), 0.f, pair(key, query)), adds ? x : 0.f);
                }
        }
    }

 private:
    static __device__ void put(float* place, float x) {
        add_to_sums<Part::COLLIDES, IN_TURN>(place, x);
    }
};

// Those of all places at which a part reads, the first COUNT of them.
template <class Part, int COUNT, int MT, int NT, bool IN_TURN>
struct SumsOfPart : SumsOfPart<Part, COUNT - 1, MT, NT, IN_TURN> {
    using Before = SumsOfPart<Part, COUNT - 1, MT, NT, IN_TURN>;
    SumsOfRead<Part, COUNT - 1, MT, NT, IN_TURN> last;

    __device__ void add(const Part& part, float dS, float s, const Pair& pair, int key, int query) {
        Before::add(part, dS, s, pair, key, query);
        last.add(part, dS, s, pair, key, query);
    }
    template <class PairOf>
    __device__ void end(const Part& part, const PairOf& pair) {
        Before::end(part, pair);
        last.end(part, pair);
    }
};
template <class Part, int MT, int NT, bool IN_TURN>
struct SumsOfPart<Part, 0, MT, NT, IN_TURN> {
    __device__ void add(const Part& part, float dS, float s, const Pair& pair, int key, int query) {
    }
    template <class PairOf>
    __device__ void end(const Part& part, const PairOf& pair) {}
};

// The loads of Q for the units of decode_block.cuh.
#pragma once
#include "decode_config.cuh"
#include "ptx.cuh"

// Q of the first unit is copied in front of the keys: behind them it would come late. Q of another
// unit is therefore fetched one unit ahead, into registers, if these are few.
template <class C>
struct UnitQuery {
    using T = typename C::T;
    using QTile = typename C::QTile;
    static constexpr int PER_THREAD = (C::BM * QTile::CHUNKS + C::THREADS - 1) / C::THREADS;
    static constexpr bool AHEAD = PER_THREAD <= 2;

    const typename C::ARGUMENTS& p;
    const uint32_t thread, sQ;
    float4 next[AHEAD ? PER_THREAD : 1];
    const float4* from[AHEAD ? PER_THREAD : 1];

    __device__ UnitQuery(const typename C::ARGUMENTS& p, uint32_t thread, uint32_t sQ)
        : p(p), thread(thread), sQ(sQ) {}

    __device__ void find_next(const UnitRows& rows) {
#pragma unroll
        for (int i = 0; i < (AHEAD ? PER_THREAD : 0); ++i)
            from[i] = find(rows, i), computed_here(from[i]);
    }
    // While the kernel in front still runs: some keys are in L2 by then, so Q, which is asked for
    // in front of them, would come last. To find many rows would take long.
    __device__ void prefetch() const {
#pragma unroll
        for (int i = 0; i < (AHEAD ? PER_THREAD : 0); ++i)
            if (from[i]) prefetch_l2(from[i]);
    }
    // Starts the copy of the first unit's Q, which was found.
    __device__ void copy(const UnitRows& rows) const {
        for_each([&](int i, int row, int chunk) {
            const float4* source = AHEAD ? from[i] : find(rows, i);
            if constexpr (C::SCALED && !C::INTEGERS) {
#pragma unroll
                for (int word = 0; word < 4; ++word)
                    cp_async_4(place_of_word(row, chunk, word),
                               reinterpret_cast<const float*>(source) + word, source != nullptr);
            } else {
                cp_async_16(sQ + QTile::offset(row, chunk), source, source != nullptr);
            }
        });
    }
    // Puts Q of another unit in its place. It was fetched before, or is now.
    __device__ void put(const UnitRows& rows) const {
        for_each([&](int i, int row, int chunk) {
            const float4 words = AHEAD ? next[i] : fetched(find(rows, i));
            if constexpr (C::SCALED && !C::INTEGERS) {
                sts_64(place_of_word(row, chunk, 0), two_words(words.x, words.z));
                sts_64(place_of_word(row, chunk, 1), two_words(words.y, words.w));
            } else {
                sts_128(sQ + QTile::offset(row, chunk), words);
            }
        });
    }
    // Fetches Q of the next unit.
    __device__ void fetch(const UnitRows& rows) {
        find_next(rows);
#pragma unroll
        for (int i = 0; i < (AHEAD ? PER_THREAD : 0); ++i) next[i] = fetched(from[i]);
    }

 private:
    __device__ const float4* find(const UnitRows& at, int i) const {
        const int row = (thread + i * C::THREADS) / QTile::CHUNKS,
                  chunk = (thread + i * C::THREADS) % QTile::CHUNKS;
        if (row >= at.rows || chunk * QTile::CHUNK >= p.head_dim) return nullptr;
        return reinterpret_cast<const float4*>(at.template of<T>(p, p.q, row) +
                                               chunk * QTile::CHUNK);
    }
    template <class Function>
    __device__ void for_each(Function function) const {
#pragma unroll 4
        for (int i = 0; i < PER_THREAD; ++i) {
            const int row = (thread + i * C::THREADS) / QTile::CHUNKS,
                      chunk = (thread + i * C::THREADS) % QTile::CHUNKS;
            if (row < C::BM) function(i, row, chunk);
        }
    }
    // Where four bytes of a chunk go in the order of products_8bit.cuh.
    __device__ uint32_t place_of_word(int row, int chunk, int word) const {
        return sQ + QTile::offset(row, chunk / 2 * 2 + word % 2) + chunk % 2 * 8 + word / 2 * 4;
    }
    static __device__ uint64_t two_words(float low, float high) {
        return static_cast<uint64_t>(__float_as_uint(high)) << 32 | __float_as_uint(low);
    }
    static __device__ float4 fetched(const float4* from) {
        return from ? *from : make_float4(0.f, 0.f, 0.f, 0.f);
    }
};

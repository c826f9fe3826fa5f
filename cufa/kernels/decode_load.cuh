// How a block of decode_block.cuh copies Q, K and V to shared memory.
#pragma once
#include "decode_config.cuh"

// How THREADS threads copy a tile of keys: ACROSS of them, one next to the other, have a row, each
// a chunk of every panel, or, with WHOLE_ROWS and if rows divide a warp, one of the row; and then
// every ROWS-th row, of the tile or of the END rows that are the warp's own. Whole rows follow each
// other in memory.
template <class Tile_, int THREADS, bool WHOLE_ROWS, bool BY_WARP>
struct TileCopy {
    using Tile = Tile_;
    static constexpr int ACROSS = WHOLE_ROWS && 32 % Tile::CHUNKS == 0 ? Tile::CHUNKS : Tile::PANEL;
    static constexpr int TOGETHER = BY_WARP ? 32 : THREADS, ROWS = TOGETHER / ACROSS,
                         END = Tile::ROWS * TOGETHER / THREADS;
    static __device__ int row(uint32_t thread) {
        return thread % THREADS / TOGETHER * END + thread % TOGETHER / ACROSS;
    }
    static __device__ int chunk(uint32_t thread) { return thread % ACROSS; }
};

// A team's ring of K and V: copies its tiles of the block's, every TEAMS-th, one after the other.
template <class C>
struct KeyLoader {
    using T = typename C::T;
    using Item = typename C::Item;
    using KV = typename C::KV;
    // Keys that lie in one page; and for how many tiles the lanes of a warp look up pages at once.
    static constexpr int GRAIN = KV::template grain<C::BN>(), GRAINS = C::BN / GRAIN,
                         LOOKED_UP = 32 / GRAINS;
    static_assert(GRAINS <= 32, "a warp looks up the pages of a tile at once");
    // Memory gives whole rows a little faster, but to warpgroups only those of sixteens that lie
    // anywhere; where each row is found by itself, a thread should have few.
    static constexpr bool WHOLE_ROWS = C::TEAM < 4 ? GRAIN == C::BN : GRAIN == 16 && GRAIN < C::BN;
    // A warp copies all of a page, where a tile has as many of them.
    static constexpr bool BY_WARP = C::TEAM == 4 && GRAINS == C::TEAM;
    using K_Copy = TileCopy<typename C::K_Tile, C::TEAM_THREADS, WHOLE_ROWS, BY_WARP>;
    using V_Copy = TileCopy<typename C::V_Tile, C::TEAM_THREADS, WHOLE_ROWS, BY_WARP>;
    enum { K_ONLY = 1, V_ONLY = 2, BOTH = 3 };

    const typename C::Arguments& p;
    const typename C::Tiles& own;
    const uint32_t thread, sK, sV;
    // The tile that is asked for next, the item that it belongs to, and that item's KV head.
    int asked = 0, kv_head = 0;
    Item item{};
    // What the table says of the pages of the tiles from there on; and the place of that tile among
    // them.
    int entries = 0, at_entries = 0;
    // Where the grain begins that this lane's entry is of, see `find_grains`.
    const T *k_at = nullptr, *v_at = nullptr;
    // Where this thread copies from, of that tile, if it lies in one piece.
    const T *k_from = nullptr, *v_from = nullptr;
    unsigned long long kept = L2_NORMAL;  // how L2 keeps what is read

    __device__ KeyLoader(const typename C::Arguments& p, const typename C::Tiles& own,
                         uint32_t thread, uint32_t ring)
        : p(p), own(own), thread(thread), sK(ring), sV(ring + C::STAGES * C::K_Tile::bytes) {}

    // Where the table says which page has this lane's keys, from a tile of a sequence on.
    __device__ const int* find_entries(int batch, int tile) const {
        const KV& kv = p;
        if (!KV::PAGED) return nullptr;
        return kv.entry(batch, min(uint32_t(key_of_lane(tile)), uint32_t(p.seq_kv - 1)));
    }
    __device__ const int* find_entries() const {
        return asked < own.count ? find_entries(item.batch, asked - item.zero) : nullptr;
    }
    static __device__ int look_up(const int* entry) { return entry ? ld_relaxed(entry) : 0; }
    // Goes to a tile of an item, or of one behind it. One entry may be known.
    __device__ void ask_from(int first, const Item& its, const int* known = nullptr,
                             int known_entry = 0) {
        asked = first, item = its, kv_head = its.kv_head(p);
        find_item(true, known, known_entry);
    }
    // The pointer that a lane has, in all of the warp.
    static __device__ const T* of_lane(const T* from, int lane) {
        const auto bits = reinterpret_cast<unsigned long long>(from);
        return reinterpret_cast<const T*>(__shfl_sync(0xffffffff, bits, lane));
    }
    __device__ void find_sources() {
        find_grains();
        if (GRAIN < C::BN) return;
        k_from = source(K_Copy(), p.k, k_at, K_Copy::row(thread));
        v_from = source(V_Copy(), p.v, v_at, V_Copy::row(thread));
    }
    // Starts the copy of K or V of the next tile, or of both, and moves on with V. What lies beyond
    // the sequence is not read: zeros stand for it.
    __device__ void ask(int slot, int what = BOTH, bool found_sources = false) {
        const int keys = item.keys - (asked - item.zero) * C::BN;
        // Nor is what is in front of all windows: its pages may be others' by now.
        const int before =
            C::Score::LEFT_EDGE ? item.first_key(p) - (asked - item.zero) * C::BN : 0;
        if (asked < own.count) {
            if (what & K_ONLY) {
                if (!found_sources) find_sources();
                load(K_Copy(), sK + slot * C::K_Tile::bytes, p.k, k_at, k_from, p.head_dim, before,
                     keys);
                cp_async_commit();
            }
            if (what & V_ONLY) {
                load(V_Copy(), sV + slot * C::V_Tile::bytes, p.v, v_at, v_from, p.head_dim_v,
                     before, keys);
                cp_async_commit();
                asked += C::TEAMS, ++at_entries, find_item(at_entries == LOOKED_UP);
            }
        } else {
            if (what & K_ONLY) cp_async_commit();
            if (what & V_ONLY) cp_async_commit();
        }
    }

 private:
    __device__ int key_of_lane(int tile) const {
        return (tile + C::lane() / GRAINS * C::TEAMS) * C::BN + C::lane() % GRAINS * GRAIN;
    }
    // Goes to the item of the next tile, from one that is not behind it.
    __device__ void find_item(bool looks_up, const int* known = nullptr, int known_entry = 0) {
        if (asked >= item.end() && asked < own.count) {
            do item.next(p, own.lengths);
            while (asked >= item.end());
            kv_head = item.kv_head(p), looks_up = true;
        }
        if (!KV::PAGED || !looks_up) return;
        const int* from = find_entries();
        entries = from == known ? known_entry : look_up(from), at_entries = 0;
    }
    __device__ const T* row(const Tensor& t, int key, int entry) const {
        const KV& kv = p;
        return kv.template row<T>(t, item.batch, kv_head, key, kv.page(entry));
    }
    // Found for many tiles at once, as that takes many instructions, when the first of them is
    // asked for, since entries take long to come. Tiles of one grain would come later so: they are
    // found one by one.
    __device__ void find_grains() {
        if (GRAIN == C::BN || at_entries > 0) return;
        const int key = key_of_lane(asked - item.zero);
        k_at = row(p.k, key, entries), v_at = row(p.v, key, entries);
    }
    // Where this thread copies row `r` of the tile from.
    template <class Copy>
    __device__ const T* source(Copy, const Tensor& t, const T* at, int r) const {
        if constexpr (GRAIN < C::BN)
            at = of_lane(at, at_entries * GRAINS + r / GRAIN);
        else
            at = row(t, (asked - item.zero) * C::BN,
                     KV::PAGED ? __shfl_sync(0xffffffff, entries, at_entries) : 0);
        return at + Copy::chunk(thread) * Copy::Tile::CHUNK + r % GRAIN * t.stride_seq;
    }
    // Starts the copy of a tile, of which the rows from `before` to the one before `keys` are read.
    template <class Copy>
    __device__ void load(Copy copy, uint32_t dst, const Tensor& t, const T* at, const T* src,
                         int cols, int before, int keys) const {
        using Tile = typename Copy::Tile;
        const int row = Copy::row(thread), chunk = Copy::chunk(thread);
        const uint32_t first = Tile::place(dst, row, chunk);
#pragma unroll
        for (int r = 0; r < Copy::END; r += Copy::ROWS) {
            if (GRAIN < C::BN && r % GRAIN == 0) src = source(copy, t, at, r + row);
#pragma unroll
            for (int c = 0; c < Tile::CHUNKS; c += Copy::ACROSS)
                cp_async_16(Tile::move_on(first, r, c / Tile::PANEL), src + c * Tile::CHUNK,
                            r + row < keys && (!C::Score::LEFT_EDGE || r + row >= before) &&
                                (c + chunk) * Tile::CHUNK < cols,
                            kept);
            src += Copy::ROWS * t.stride_seq;
        }
    }
};

// Q of a block's items. That of the first is copied in front of the keys, behind which it would
// come late. So that of another is fetched one item ahead, into registers, if they are few.
template <class C>
struct QueryLoader {
    using T = typename C::T;
    using Tile = typename C::Q_Tile;
    static constexpr int PER_THREAD = (C::BM * Tile::CHUNKS + C::THREADS - 1) / C::THREADS;
    static constexpr bool AHEAD = PER_THREAD <= 2;
    static constexpr int FOUND = AHEAD ? PER_THREAD : 0;  // ahead

    const typename C::Arguments& p;
    const uint32_t thread, sQ;
    float4 next[AHEAD ? PER_THREAD : 1];
    const float4* from[AHEAD ? PER_THREAD : 1];

    __device__ QueryLoader(const typename C::Arguments& p, uint32_t thread, uint32_t sQ)
        : p(p), thread(thread), sQ(sQ) {}

    __device__ void find_next(const ItemRows& rows) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) from[i] = find(rows, i), computed_here(from[i]);
    }
    // Starts the copy of those that have been found.
    __device__ void copy(const ItemRows& rows) const {
        for_each([&](int i, uint32_t place) {
            const float4* its = AHEAD ? from[i] : find(rows, i);
            cp_async_16(place, its, its != nullptr);
        });
    }
    __device__ void fetch_next(const ItemRows& rows) {
        if (!AHEAD) return;
        find_next(rows);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) next[i] = fetched(from[i]);
    }
    // Puts those that have been fetched in the place of those before.
    __device__ void change(const ItemRows& rows) const {
        for_each([&](int i, uint32_t place) {
            sts_128(place, AHEAD ? next[i] : fetched(find(rows, i)));
        });
    }

 private:
    __device__ const float4* find(const ItemRows& rows, int i) const {
        const int row = (thread + i * C::THREADS) / Tile::CHUNKS,
                  chunk = (thread + i * C::THREADS) % Tile::CHUNKS;
        if (row >= rows.rows || chunk * Tile::CHUNK >= p.head_dim) return nullptr;
        return reinterpret_cast<const float4*>(rows.template of<T>(p, p.q, row) +
                                               chunk * Tile::CHUNK);
    }
    static __device__ float4 fetched(const float4* from) {
        return from ? *from : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    template <class Function>
    __device__ void for_each(Function function) const {
#pragma unroll 4
        for (int i = 0; i < PER_THREAD; ++i) {
            const int row = (thread + i * C::THREADS) / Tile::CHUNKS,
                      chunk = (thread + i * C::THREADS) % Tile::CHUNKS;
            if (row < C::BM) function(i, sQ + Tile::offset(row, chunk));
        }
    }
};

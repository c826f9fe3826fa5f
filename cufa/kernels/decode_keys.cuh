// The tiles of keys of a team of decode_block.cuh: where they are in memory, and their copies to
// shared memory.
#pragma once
#include "decode_config.cuh"
#include "ptx.cuh"

// How THREADS threads copy a tile of keys. ACROSS neighbours share a row: each copies a chunk of
// every panel, or one chunk of the row with WHOLE_ROWS, if rows divide a warp. They copy every
// ROWS-th row, of the tile or of the END rows that are the warp's own. Whole rows follow each other
// in memory.
template <class Tile_, int THREADS, bool WHOLE_ROWS, bool BY_WARP>
struct TileCopy {
    using Tile = Tile_;
    static constexpr int ACROSS = WHOLE_ROWS && 32 % Tile::CHUNKS == 0
                                      ? Tile::CHUNKS
                                      : Tile::PANEL;  // chunks of a row at once
    static constexpr int TOGETHER = BY_WARP ? 32 : THREADS, ROWS = TOGETHER / ACROSS,
                         END = Tile::ROWS * TOGETHER / THREADS;
    // Whether each thread has a part; narrow rows of 8 bits may be fewer than threads.
    static constexpr bool ALL = ROWS <= END;
    static __device__ int row(uint32_t thread) {
        return thread % THREADS / TOGETHER * END + thread % TOGETHER / ACROSS;
    }
    static __device__ int chunk(uint32_t thread) { return thread % ACROSS; }
};

template <class C>
struct TeamKeys {
    using Element = typename C::Element;
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;
    using KTile = typename C::KTile;
    using VTile = typename C::VTile;
    using Unit = typename C::Unit;
    static constexpr int BN = C::BN, TEAM = C::TEAM, TEAMS = C::TEAMS;
    // Keys that lie together; how many such grains a tile has; and how many tiles a warp looks up.
    static constexpr int GRAIN = KV::template grain<BN>(), GRAINS = BN / GRAIN,
                         LOOKED_UP = 32 / GRAINS;
    static_assert(GRAINS <= 32, "a warp looks up the pages of a tile at once");
    // Whole rows are read a little faster; by warpgroups only if groups of sixteen rows lie
    // anywhere. Where each row is found by itself, a thread should have few.
    static constexpr bool WHOLE_ROWS = TEAM < 4 ? GRAIN == BN : GRAIN == 16 && GRAIN < BN;
    // A warp copies a whole page, if a tile has as many pages as the team has warps.
    static constexpr bool BY_WARP = TEAM == 4 && GRAINS == TEAM;
    using KCopy = TileCopy<KTile, C::TEAM_THREADS, WHOLE_ROWS, BY_WARP>;
    using VCopy = TileCopy<VTile, C::TEAM_THREADS, WHOLE_ROWS, BY_WARP>;

    const typename C::ARGUMENTS& p;
    typename C::Share share;
    const uint32_t thread;
    const int lane;
    const uint32_t sK, sV;  // the team's rings
    // This team's tile of the share that is asked for next, the unit that it belongs to, and that
    // unit's KV head.
    int asked = 0, kv_head_asked = 0;
    Unit of_asked{};
    // The table's entries for the tiles from there on, looked up at once by the lanes of a warp,
    // for GRAIN keys each; and the place of that tile among them.
    int entries = 0, at_entries = 0;
    // Where the grain of this lane's entry begins. That takes many instructions, so it is found for
    // many tiles at once; and when the first of them is asked for, since entries take long to come.
    // Tiles of one grain would come later so: they are found one by one.
    const Element *k_at = nullptr, *v_at = nullptr;
    const float *k_scale_at = nullptr, *v_scale_at = nullptr;
    // Where this thread finds the tile that is asked for next, if that lies in one grain.
    const Element *k_from = nullptr, *v_from = nullptr;
    const float *k_scale_from = nullptr, *v_scale_from = nullptr;
    unsigned long long kept = L2_NORMAL;  // how long L2 keeps what is read

    __device__ TeamKeys(const typename C::ARGUMENTS& p, uint32_t thread, uint32_t ring)
        : p(p), thread(thread), lane(thread % 32), sK(ring), sV(ring + C::STAGES * KTile::bytes) {}
    __device__ uint32_t k_scales(int slot) const {  // behind all tiles
        return sV + C::STAGES * VTile::bytes + slot * C::SCALE_BYTES;
    }
    __device__ uint32_t v_scales(int slot) const {
        return k_scales(slot) + C::STAGES * C::SCALE_BYTES;
    }

    // --- which tile is next, and where its pages are ---

    __device__ int key_of_lane(int tile) const {  // a tile of the unit
        return (tile + lane / GRAINS * TEAMS) * BN + lane % GRAINS * GRAIN;
    }
    __device__ const int* find_entries(int batch, int tile) const {
        const KV& kv = p;
        return KV::PAGED ? kv.entry(batch, min(uint32_t(key_of_lane(tile)), uint32_t(p.seq_kv - 1)))
                         : nullptr;
    }
    __device__ const int* find_entries_asked() const {
        return asked < share.count ? find_entries(of_asked.batch, asked - of_asked.zero) : nullptr;
    }
    static __device__ int look_up(const int* entry) { return entry ? ld_relaxed(entry) : 0; }
    // Goes to the unit of the tile that is asked for next, from one that is not behind it. One
    // entry may be known.
    __device__ void find_asked(bool looks_up, const int* known = nullptr, int known_entry = 0) {
        if (asked >= of_asked.end() && asked < share.count) {
            do of_asked.next(p);
            while (asked >= of_asked.end());
            kv_head_asked = of_asked.kv_head(p), looks_up = true;
        }
        if (!KV::PAGED || !looks_up) return;
        const int* from = find_entries_asked();
        entries = from == known ? known_entry : look_up(from), at_entries = 0;
    }
    __device__ void ask_from(int first, const Unit& unit, const int* known = nullptr,
                             int known_entry = 0) {
        asked = first, of_asked = unit, kv_head_asked = unit.kv_head(p);
        find_asked(true, known, known_entry);
    }

    // --- where its rows are ---

    template <class T>
    __device__ const T* row(const Tensor& t, int key, int entry) const {
        const KV& kv = p;
        return kv.template row<T>(t, of_asked.batch, kv_head_asked, key, kv.page(entry));
    }
    template <class T>
    static __device__ const T* of_lane(const T* from, int number) {  // in all of the warp
        return reinterpret_cast<const T*>(
            __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(from), number));
    }
    // Row r of the tile that is asked for next. `at` is where the grain of this lane's entry is.
    template <class T>
    __device__ const T* row_of_tile(const Tensor& t, const T* at, int r) const {
        if constexpr (GRAIN < BN) {
            at = of_lane(at, at_entries * GRAINS + r / GRAIN);
        } else {
            at = row<T>(t, (asked - of_asked.zero) * BN,
                        KV::PAGED ? __shfl_sync(0xffffffff, entries, at_entries) : 0);
        }
        return at + r % GRAIN * t.stride_seq;
    }
    template <class Copy>
    __device__ const Element* source(Copy, const Tensor& t, const Element* at, int r) const {
        return row_of_tile(t, at, r) + Copy::chunk(thread) * Copy::Tile::CHUNK;
    }
    __device__ void find_grains() {
        if (GRAIN == BN || at_entries > 0) return;
        const int key = key_of_lane(asked - of_asked.zero);
        k_at = row<Element>(p.k, key, entries), v_at = row<Element>(p.v, key, entries);
        if constexpr (C::SCALED)
            k_scale_at = row<float>(p.k_scale, key, entries),
            v_scale_at = row<float>(p.v_scale, key, entries);
    }
    __device__ void find_sources() {
        find_grains();
        if (GRAIN < BN) return;
        k_from = source(KCopy(), p.k, k_at, KCopy::row(thread)),
        v_from = source(VCopy(), p.v, v_at, VCopy::row(thread));
        if constexpr (C::SCALED)
            k_scale_from = row_of_tile(p.k_scale, k_scale_at, key_of_scale(0)),
            v_scale_from = row_of_tile(p.v_scale, v_scale_at, key_of_scale(0));
    }
    // The key of a tile whose scale this thread copies in a round of all threads. Where they are
    // more than keys, some copy nothing.
    __device__ int key_of_scale(int first) const { return first + thread % C::TEAM_THREADS % BN; }

    // --- copies ---

    // Data that is read once leaves L2 first, unless other row tiles read it, too. So pieces and
    // results stay in L2, and are not written to memory in between. Where a whole unit's results
    // are next to nothing, reading is faster without that.
    __device__ void keep_in_l2(const UnitRows& rows, const Pieces& pieces) {
        const bool once = !pieces.one() || share.unit.tiles * BN < 1024 * max(rows.rows, 4);
        kept = p.row_tiles.divisor == 1 && once ? L2_READ_ONCE : L2_NORMAL;
    }

    enum { K_ONLY = 1, V_ONLY = 2, BOTH = 3 };
    // Starts the copy of K or V of a tile, or of both, and moves on to the next tile with V.
    __device__ void ask(int slot, int what = BOTH, bool found_sources = false) {
        const int keys = of_asked.keys - (asked - of_asked.zero) * BN;
        // Keys in front of all windows are not read: its pages may be others' by now.
        const int before =
            SCORE::LEFT_EDGE ? of_asked.first_key(p) - (asked - of_asked.zero) * BN : 0;
        if (asked < share.count) {
            if (what & K_ONLY) {
                if (!found_sources) find_sources();
                load(KCopy(), sK + slot * KTile::bytes, p.k, k_at, k_from, p.head_dim, keys,
                     before);
                if constexpr (C::SCALED)
                    load_scales(k_scales(slot), p.k_scale, k_scale_at, k_scale_from, keys, before);
                cp_async_commit();
            }
            if (what & V_ONLY) {
                load(VCopy(), sV + slot * VTile::bytes, p.v, v_at, v_from, p.head_dim_v, keys,
                     before);
                if constexpr (C::SCALED)
                    load_scales(v_scales(slot), p.v_scale, v_scale_at, v_scale_from, keys, before);
                cp_async_commit();
                asked += TEAMS, ++at_entries;
                find_asked(at_entries == LOOKED_UP);
            }
        } else {
            if (what & K_ONLY) cp_async_commit();
            if (what & V_ONLY) cp_async_commit();
        }
    }

    // While the kernel in front still runs, L2 gets some of this team's first keys, 4 KB a warp or
    // eight keys; or its first tile, if no team has two. If all teams had a tile there, memory
    // would stand still while that comes from L2, and what the kernel in front merges would come
    // late. Where units are whole and have few rows, it would take what others still read. Keys
    // that are not adjacent in a page are not fetched where a tile has several pages.
    __device__ void prefetch(int warp) const {
        constexpr int KEY_BYTES = (C::HEAD_DIM + C::HEAD_DIM_V) * int(sizeof(Element)),
                      OF_4_KB = (4 << 10) * TEAM / KEY_BYTES, SOME = OF_4_KB > 8 ? OF_4_KB : 8;
        if (warp % TEAM > 0 || asked >= share.count) return;
        const int most = share.count > TEAMS && SOME < BN ? SOME : BN;
        const int keys = min(most, of_asked.keys - (asked - of_asked.zero) * BN);
        prefetch(GRAIN < BN ? k_at : k_from, p.k, p.head_dim, keys),
            prefetch(GRAIN < BN ? v_at : v_from, p.v, p.head_dim_v, keys);
    }

 private:
    // Keys beyond the sequence, or before those that are seen, are not read: zeros stand for it.
    template <class Copy>
    __device__ void load(Copy copy, uint32_t dst, const Tensor& t, const Element* at,
                         const Element* src, int cols, int keys, int before) const {
        using Tile = typename Copy::Tile;
        const int row = Copy::row(thread), chunk = Copy::chunk(thread);
        const uint32_t first = Tile::place(dst, row, chunk);
#pragma unroll
        for (int r = 0; r < Copy::END; r += Copy::ROWS) {
            if (GRAIN < BN && r % GRAIN == 0) src = source(copy, t, at, r + row);
#pragma unroll
            for (int c = 0; c < (Copy::ALL || row < Copy::END ? Tile::CHUNKS : 0);
                 c += Copy::ACROSS)
                cp_async_16(Tile::move_on(first, r, c / Tile::PANEL), src + c * Tile::CHUNK,
                            r + row < keys && (!SCORE::LEFT_EDGE || r + row >= before) &&
                                (c + chunk) * Tile::CHUNK < cols,
                            kept);
            src += Copy::ROWS * t.stride_seq;
        }
    }
    // The same of their scales.
    __device__ void load_scales(uint32_t dst, const Tensor& t, const float* at, const float* from,
                                int keys, int before) const {
#pragma unroll
        for (int first = 0; first < BN; first += C::TEAM_THREADS) {
            const int key = key_of_scale(first);
            const float* src = from + first * t.stride_seq;
            if constexpr (GRAIN < BN) src = row_of_tile(t, at, key);
            if (BN >= C::TEAM_THREADS || thread % C::TEAM_THREADS < BN)
                cp_async_4(dst + key * 4, src, key < keys && (!SCORE::LEFT_EDGE || key >= before));
        }
    }
    __device__ void prefetch(const Element* from, const Tensor& t, int cols, int keys) const {
        const bool adjacent = t.stride_seq == cols;
        int rows = lane < keys;
        if (GRAIN < BN)  // each lane has a grain
            rows = adjacent ? min(GRAIN, keys - lane * GRAIN) : 0;
        else if (adjacent)
            rows = lane == 0 ? keys : 0;
        // ptxas takes the warp for divergent without a shuffle here.
        if (GRAIN == BN) from = of_lane(from, 0) + (adjacent ? 0 : lane * t.stride_seq);
        const int bytes = rows * cols * int(sizeof(Element)) / 16 * 16;
        if (bytes > 0) prefetch_l2(from, bytes);
    }
};

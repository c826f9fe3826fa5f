// How a block of decode_block.cuh begins: it reads ahead of the kernel in front.
#pragma once
#include "decode_load.cuh"

// What a block reads before the kernel in front has ended, from lengths and a table that this may
// still write, and the proof afterwards that it has read the same. It saves 2.5 us of a call of 4
// to 6.6 us in a CUDA graph, where a decode follows a decode or an append.
template <class C>
struct ReadAhead {
    using T = typename C::T;
    using Item = typename C::Item;
    using KV = typename C::KV;

    const typename C::Arguments& p;
    typename C::Tiles& own;
    KeyLoader<C>& keys;
    QueryLoader<C>& queries;
    const unsigned char* smem;
    const int warp;
    // Of the block's first item
    ItemRows rows;
    Splits splits{};
    int first_entries = 0;             // what the table says of the team's first tiles,
    const int* first_entry = nullptr;  // where
    const int* looked_at = nullptr;    // and the length of this lane's sequence, or the block's

    // Finds the block's tiles, and asks for Q and the first of them; again, if lengths or the table
    // are others when the kernel in front has ended.
    __device__ void begin() {
        for (bool ended = false;; ended = true) {
            const bool is_known = find(ended);
            if (!ended) {
                wait_for_kernel_in_front(own.count);
                if (!is_known) continue;
            }
            ask();
            if (ended || holds()) return;
            cp_async_wait<0>();
        }
    }

    // Whether the tiles are known. If not, they depend on all lengths of many sequences.
    __device__ bool find(bool ended) {
        // Where a block has a whole item, its pages are looked up together with its length, unless
        // that says where they begin.
        const int block = blockIdx.x, team = warp / C::TEAM;
        const bool whole = !C::Score::LEFT_EDGE && (C::WHOLE || p.splits.divisor == 1);
        const int batch = min(p.items.quotient(block), p.batch - 1);
        own.lengths.look(p);
        const int* known = whole ? keys.find_entries(batch, team) : nullptr;
        const int known_entry = keys.look_up(known);
        own.find(p, block, ended), keys.ask_from(team, own.item, known, known_entry);
        // All warps or none: what follows has barriers, and each may have read another length.
        const bool is_known =
            C::WHOLE || own.lengths.few || ended || !p.spread || !__syncthreads_or(!own.equal);
        first_entries = keys.entries, first_entry = keys.find_entries();
        rows = ItemRows(p, own.item, C::BM), splits = own.splits_of(p, own.item, block);
        // What is read once leaves L2 first, unless other row tiles read it, too: results stay
        // there, which memory would take in between. Where a whole item's results are next to
        // nothing, reading is faster without that.
        const bool once = !splits.one() || own.item.tiles * C::BN < 1024 * max(rows.rows, 4);
        keys.kept = p.row_tiles.divisor == 1 && once ? L2_READ_ONCE : L2_NORMAL;
        queries.find_next(rows), keys.find_sources();
        looked_at = own.lengths.place(p, own.lengths.few ? C::lane() : own.item.batch);
        computed_here(looked_at);
        if (!ended) {
            fetch_queries();
            if (own.lengths.few && (C::TEAM == 4 || p.splits.divisor > 1)) fetch_keys();
        }
        computed_here(keys.k_from), computed_here(keys.v_from), computed_here(first_entry);
        computed_here(splits.begin), computed_here(splits.end);
        return is_known;
    }
    // In front of keys, of which some are in L2 by then, Q would come last. Of many rows it would
    // take long to find.
    __device__ void fetch_queries() const {
#pragma unroll
        for (int i = 0; i < queries.FOUND; ++i)
            if (queries.from[i]) prefetch_l2(queries.from[i]);
    }
    // L2 gets some of this team's first keys, 4 KB a warp or eight keys; or its first tile, if no
    // team has two. If all teams had a tile there, memory would stand still while that comes from
    // L2, and what the kernel in front merges would come late. Where items are whole and have few
    // rows, it would take what others still read.
    __device__ void fetch_keys() const {
        constexpr int OF_4_KB =
                          (4 << 10) * C::TEAM / ((C::HEAD_DIM + C::HEAD_DIM_V) * int(sizeof(T))),
                      SOME = OF_4_KB > 8 ? OF_4_KB : 8;
        if (warp % C::TEAM > 0 || keys.asked >= own.count) return;
        const int most = own.count > C::TEAMS && SOME < C::BN ? SOME : C::BN;
        const int n = min(most, keys.item.keys - (keys.asked - keys.item.zero) * C::BN);
        fetch_rows(keys.k_at, keys.k_from, p.k, p.head_dim, n);
        fetch_rows(keys.v_at, keys.v_from, p.v, p.head_dim_v, n);
    }
    // Keys that are not adjacent in a page are not fetched where a tile has several pages.
    __device__ void fetch_rows(const T* at, const T* from, const Tensor& t, int cols, int n) const {
        constexpr int GRAIN = KeyLoader<C>::GRAIN;
        const bool adjacent = t.stride_seq == cols;
        int some = C::lane() < n;
        if (GRAIN < C::BN)  // each lane has a grain
            some = adjacent ? min(GRAIN, n - C::lane() * GRAIN) : 0;
        else if (adjacent)
            some = C::lane() == 0 ? n : 0;
        // ptxas takes the warp for divergent without a shuffle here.
        if (GRAIN == C::BN) at = keys.of_lane(from, 0) + (adjacent ? 0 : C::lane() * t.stride_seq);
        const int bytes = some * cols * int(sizeof(T)) / 16 * 16;
        if (bytes > 0) prefetch_l2(at, bytes);
    }

    // Lengths and the entry come to shared memory, as Q and keys do: no load that has to come first
    // stands in front of those.
    __device__ void ask() {
        queries.copy(rows);
        const uint32_t seen = queries.sQ + C::SUM + threadIdx.x * 8;
        cp_async_4(seen, looked_at, p.lengths);
        if (KV::PAGED) cp_async_4(seen + 4, first_entry, first_entry != nullptr);
        cp_async_commit();
        // In front of a loop with loads, as those from the table, the compiler waits for all
        // before.
        if (KV::PAGED) keys.ask(0, keys.BOTH, true);
#pragma unroll 1
        for (int i = KV::PAGED; i < C::STAGES; ++i) keys.ask(i, keys.BOTH, i == 0);
    }

    // Whether what has been asked for is the block's. A length may be another one, if the tiles are
    // the same, and those on their way are whole.
    __device__ bool holds() {
        static_assert(C::End::SUM_BYTES >= C::THREADS * 8, "what is seen once more comes there");
        cp_async_wait<2 * C::STAGES>();
        const int* seen = reinterpret_cast<const int*>(smem + C::SUM) + threadIdx.x * 2;
        int now = keys_of_length(p, p.lengths ? seen[0] : p.seq_kv);
        Item& item = own.item;
        // Whether the tiles may depend on others than the own length: on those of few sequences if
        // one has changed, and on those of many as they have not been looked at yet.
        bool depends = !C::WHOLE && p.lengths && p.spread;
        if (own.lengths.few) {
            depends = depends && __any_sync(0xffffffff, now != own.lengths.of_lane);
            own.lengths.of_lane = now, now = own.lengths.keys(p, item.batch);
        }
        bool same = !depends || (own.equal && own.has_equal_splits(p, own.tiles_of_all(p)));
        same = same && (!KV::PAGED || seen[1] == first_entries);
        if (item.tiles > 0 && now != item.keys) {
            const int whole = item.zero + min(now, item.keys) / C::BN;
            same = same && item.is_same_with(p, now) && keys.asked - C::TEAMS < whole;
            if constexpr (C::Score::LEFT_EDGE)
                same = same && (warp / C::TEAM - item.zero) * C::BN >=
                                   Item::first_key_of(p, max(now, item.keys));
            item.keys = keys.item.keys = now;
        }
        return __all_sync(0xffffffff, same);
    }
};

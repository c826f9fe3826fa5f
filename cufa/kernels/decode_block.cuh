// Flash-decoding (Dao et al. 2023): attention of few queries to many keys, by reading K and V once,
// at the speed of memory; for decode.cu and decode_wgmma.cu, which have the products. A work item
// is a sequence, a KV head and a tile of rows; how blocks divide items says decode_scheduler.cuh.
// The query heads that share a KV head are the rows of one tile, as the flat product of
// flash-decoding++ (Hong et al. 2023) has them. The teams of a block, of one or some warps, take
// tiles of BN keys in turn, each through a ring of its own, filled by cp.async: in the main loop
// none waits for another. Where an item ends, its teams' O are added up, and where it was split,
// the last of its blocks merges the splits. Calls are short: what is run once is written for few
// instructions, as nothing hides their latency.
#pragma once
#include "decode_ahead.cuh"

// The unified maximum of flash-decoding++ (section 3): P = exp(S - m) with one preset m for all.
// Row sums of which P is exact enough, and what is least for so many keys: float16 ends at 65504,
// and begins to lose digits below 2^-14.
template <class T>
struct Unified {
    static constexpr float MOST_SUM = 0x1p15f, LEAST_SUM = 0x1p-6f, LEAST_MEAN = 0x1p-15f;
};
template <>
struct Unified<bfloat16> {  // it has the range of float32
    static constexpr float MOST_SUM = 0x1p64f, LEAST_SUM = 0x1p-64f, LEAST_MEAN = 0.f;
};
// How many times a warp has found sums out of range, and computed its keys of an item again.
extern "C" __device__ int decode_recomputed = 0;

// A warp's O of an item, from the tiles of its team.
template <class C>
struct Attention {
    using T = typename C::T;
    using Item = typename C::Item;
    using Softmax = typename C::Softmax;

    const typename C::Arguments& p;
    KeyLoader<C>& keys;
    const uint32_t sQ;
    const int team, first_row;  // of this warp's in the tile
    int slot = 0, at;           // of the ring; this team's tile that is computed next
    float rO[C::MT][C::OT][4];

    __device__ Attention(const typename C::Arguments& p, KeyLoader<C>& keys, uint32_t sQ, int team,
                         int first_row)
        : p(p), keys(keys), sQ(sQ), team(team), first_row(first_row), at(team) {}

    __device__ void attend(const Item& item, const ItemRows& tile, Softmax& softmax) {
        const int at_begin = at, at_end = min(item.end(), keys.own.count);
#pragma unroll
        for (int i = 0; i < C::MT * C::OT * 4; ++i) rO[i / 4 / C::OT][i / 4 % C::OT][i % 4] = 0.f;
        if (C::UNIFIED && at < at_end) softmax.fix(p.unified_max);
        take(item, tile, softmax, at_end, !C::UNIFIED, false);
        if constexpr (C::UNIFIED) {
            // Where sums are out of the range in which P is exact enough, these keys are read and
            // taken again, with maxima.
            const int seen = (at_end - at_begin + C::TEAMS - 1) / C::TEAMS * C::BN;
            if (at_begin < at_end && item.keys > 0 && out_of_range(softmax, tile.rows, seen)) {
                if (C::lane() == 0) atomicAdd(&decode_recomputed, 1);
                cp_async_wait<0>();
                __syncwarp();
                at = at_begin, slot = 0;
                keys.ask_from(at_begin, item);
#pragma unroll 1
                for (int i = 0; i < C::STAGES; ++i) keys.ask(i);
                softmax.reset();
#pragma unroll
                for (int i = 0; i < C::MT * C::OT * 4; ++i)
                    rO[i / 4 / C::OT][i / 4 % C::OT][i % 4] = zero_anew();
                take(item, tile, softmax, at_end, true, true);
            }
        }
    }

 private:
    // `exact`: with row maxima; `alone`: other teams do not take theirs at the same time.
    __device__ void take(const Item& item, const ItemRows& tile, Softmax& softmax, int at_end,
                         bool exact, bool alone) {
        const typename C::Score& score = p;
        const Sequence sequence{p.seq_q, item.keys};
        // Tiles of keys that all rows see
        const int whole_end = score.sees(sequence, tile.query(p, 0)).end / C::BN;
        const int last_first =
            C::Score::LEFT_EDGE ? score.sees(sequence, tile.query(p, tile.rows - 1)).first : 0;
        const int whole_first = (max(0, last_first) + C::BN - 1) / C::BN;
        const int item_begin = max(item.begin(), 0);
        // All teams ask at once for what lies together, if each has some of it.
        auto wait_for_all = [&] {
            const int first = at - team;
            if (C::TOGETHER && !alone && first >= item_begin && first + C::TEAMS <= at_end)
                named_barrier_sync(15, C::THREADS);
        };
        for (; at < at_end; at += C::TEAMS) {
            const int j = at - item.zero;
            // S = Q K^T
            cp_async_wait<2 * C::STAGES - 1>();
            C::Products::written();
            C::team_sync(team);
            float rS[C::MT][C::NT][4] = {};
            const uint32_t tile_k = keys.sK + slot * C::K_Tile::bytes,
                           tile_v = keys.sV + slot * C::V_Tile::bytes;
            C::Products::template qk<T, typename C::Q_Tile, typename C::K_Tile>(rS, sQ, tile_k,
                                                                                first_row);
            if (C::TOGETHER) C::team_sync(team), wait_for_all(), keys.ask(slot, keys.K_ONLY);

            // P = exp(S - m); m, l and O follow
            const GroupedAt rows_at{C::lane(),  tile.first + first_row, j * C::BN, p.group,
                                    tile.batch, tile.first_head};
            score.apply(rS, sequence, p.scale_log2, rows_at,
                        {j >= whole_end, C::Score::LEFT_EDGE && j < whole_first});
            if (exact)
                softmax.update(rS, rO);
            else
                softmax.exponentiate(rS);

            // O += P V
            cp_async_wait<2 * C::STAGES - (C::TOGETHER ? 1 : 2)>();
            C::Products::written();
            C::team_sync(team);
            C::Products::template pv<T, typename C::V_Tile>(rO, rS, tile_v);
            C::team_sync(team), wait_for_all();
            keys.ask(slot, C::TOGETHER ? keys.V_ONLY : keys.BOTH);
            slot = slot == C::STAGES - 1 ? 0 : slot + 1;
        }
    }
    // Whether some row's sum is not what P of 16 bits, with a preset maximum, adds up exactly
    // enough.
    static __device__ bool out_of_range(const Softmax& softmax, int rows, int keys) {
        const float most = Unified<T>::MOST_SUM,
                    least = fmaxf(Unified<T>::LEAST_SUM, keys * Unified<T>::LEAST_MEAN);
        bool found = false;
#pragma unroll
        for (int i = 0; i < C::MT * 2; ++i) {
            const float l = lanes_sum<4>(softmax.l[i / 2][i % 2]);
            found |= i * 8 + C::lane() / 4 < rows && !(l >= least && l <= most);
        }
        return __any_sync(0xffffffff, found) != 0;
    }
};

// Merges the splits of an item, if this is the block for it, or helps.
template <class C, class Merging, class Writer>
__device__ void merge_item(const Merging& merging, const Writer& writer, const ItemRows& tile) {
    const typename C::Arguments& p = writer.p;
    const float m_to_log2 = writer.m_to_log2;
    const int rows = tile.rows, n = merging.end - merging.partial.begin;
    auto place = [&](int row, int col) {
        return tile.template of<typename C::T>(p, p.o, row) + col;
    };
    auto write = [&](typename C::T* of_row, int row, int col, float2 o, float m, float l) {
        const float two[2] = {o.x, o.y};
        writer.write(tile, row, col, of_row, two, m, l);
    };
    // Chosen in front of the blocks' shares: inside, ptxas takes warps for divergent. Few rows of
    // few columns whose rings have more stages than one are of short items, whose splits are many.
    constexpr bool MANY = C::End::MANY, MAY_BE_FEW = MANY || C::HEAD_DIM_V > 128 || C::STAGES == 1;
    if (MAY_BE_FEW && n == 2)
        merging.each_share([&](int share, int shares) {
            merge_few_splits<C::WARPS, MANY ? 4 : 1, 2>(merging.partial, n, rows, share, shares,
                                                        m_to_log2, place, write);
        });
    else if (MAY_BE_FEW && n <= 4)
        merging.each_share([&](int share, int shares) {
            merge_few_splits<C::WARPS, MANY ? 2 : 1, 4>(merging.partial, n, rows, share, shares,
                                                        m_to_log2, place, write);
        });
    else
        merging.each_share([&](int share, int shares) {
            merge_splits<C::WARPS, MANY ? 2 : 1>(merging.partial, merging.end, rows, share, shares,
                                                 m_to_log2, place, write);
        });
}

template <class C>
__device__ void decode_block(const typename C::Arguments& p) {
    using End = typename C::End;
    using Results = typename C::Results;
    extern __shared__ __align__(1024) unsigned char smem[];
    float* sSum = reinterpret_cast<float*>(smem + C::SUM);
    auto* sM = reinterpret_cast<typename End::OfTeams*>(smem + C::STATE);  // [BM], then as many l
    int sQ = smem_address(smem);
    computed_here(sQ);  // else it is found once more in front of the first keys, which takes long
    const int thread = threadIdx.x, lane = thread % 32, warp = C::warp(), team = warp / C::TEAM,
              block = blockIdx.x;
    const float scale = C::Score::LINEAR ? p.scale_log2 : 1.f, m_to_log2 = C::FP32 ? scale : 1.f;

    launch_dependents();
    typename C::Tiles own;
    KeyLoader<C> keys(p, own, thread, sQ + C::Q_Tile::bytes + team * C::RING);
    QueryLoader<C> queries(p, thread, sQ);
    ReadAhead<C> ahead{p, own, keys, queries, smem, warp, ItemRows(p, own.item, C::BM)};
    ahead.begin();
    // Q and lengths may be on their way to shared memory, which is the next block's then.
    if (own.count <= 0) return cp_async_wait<0>();
    const ItemRows first_rows = ahead.rows;
    const Splits first_splits = ahead.splits;

    const RowWriter<typename C::T, typename C::Softmax, typename C::Arguments> writer{p, m_to_log2};
    const End item_end{writer, sSum, sM, sM + C::BM, reinterpret_cast<typename C::T**>(smem)};
    const MergingBlocks<C::WARPS, C::HEAD_DIM_V> merging{
        Results(p, first_splits.begin, C::BM), block, first_splits.end,
        first_rows.rows * Results::PARTS > C::WARPS};
    merging.begin();
    Attention<C> attention(p, keys, sQ, team, warp % C::TEAM * C::WARP_ROWS);
    bool first = true;
    Splits splits = first_splits;
    for (typename C::Item item = own.item;;) {
        const ItemRows tile(p, item, C::BM);
        const bool last = C::WHOLE || item.end() >= own.count;
        typename C::Item next = item;
        if (!last) next.next(p, own.lengths);

        if (first) {
            cp_async_wait<2 * C::STAGES>();
        } else {
            __syncthreads();
            queries.change(tile);
        }
        if (!last) queries.fetch_next(ItemRows(p, next, C::BM));
        C::Products::written();
        __syncthreads();

        typename C::Softmax softmax(scale);
        attention.attend(item, tile, softmax);
        const Results partial(p, splits.begin, C::BM);
        item_end.hand_on(attention.rO, softmax, tile, partial, block, splits.one(), last, warp,
                         lane);
        if (last) break;
        item = next, splits = own.splits_of(p, item, block), first = false;
    }
    cp_async_wait<0>();
    // All other items are done by now, and so are those of the blocks that this one waits for, or
    // nearly so.
    if (block != first_splits.begin) merge_item<C>(merging, writer, first_rows);
}

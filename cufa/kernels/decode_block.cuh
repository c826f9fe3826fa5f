// Flash-decoding (Dao et al. 2023): attention of few queries to many keys, by reading K and V once,
// at the speed of memory; for decode.cu and decode_wgmma.cu, which have the products. The keys of
// all sequences are shared out evenly among the blocks, see decode_scheduler.cuh. The query heads
// that share a KV head are the rows of one tile, as the flat product of flash-decoding++ (Hong et
// al. 2023) has them. The teams of a block, of one or some warps, take tiles of BN keys in turn,
// each through a ring of its own, filled by cp.async: in the main loop none waits for another.
// Where a unit ends, its teams' O are added up, and where it was cut, the last of its blocks merges
// the pieces. Calls are short: what is run once is written for few instructions, as nothing hides
// their latency.
#pragma once
#include "decode_end.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

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
// How many times a warp has found sums out of range, and computed its keys of a unit again.
extern "C" __device__ int decode_recomputed = 0;

// How THREADS threads copy a tile of keys: ACROSS of them beside each other have a row, each a
// chunk of every panel, or, with WHOLE_ROWS and if rows divide a warp, one of the row; and then
// every ROWS-th row, of the tile or of the END rows that are the warp's own. Whole rows follow each
// other in memory.
template <class Tile_, int THREADS, bool WHOLE_ROWS, bool BY_WARP>
struct TileCopy {
    using Tile = Tile_;
    static constexpr int ACROSS = WHOLE_ROWS && 32 % Tile::CHUNKS == 0
                                      ? Tile::CHUNKS
                                      : Tile::PANEL;  // chunks of a row at once
    static constexpr int TOGETHER = BY_WARP ? 32 : THREADS, ROWS = TOGETHER / ACROSS,
                         END = Tile::ROWS * TOGETHER / THREADS;
    static __device__ int row(uint32_t thread) {
        return thread % THREADS / TOGETHER * END + thread % TOGETHER / ACROSS;
    }
    static __device__ int chunk(uint32_t thread) { return thread % ACROSS; }
};

// With WHOLE, each block has a unit to itself: nothing is cut, and nothing is merged.
// PRODUCTS says how many warps a team has, which share a ring and have as many rows each; what a
// thread does for what it has written to shared memory before others use that; and what S = Q K^T
// and O += P V of a warp are.
template <class PRODUCTS, class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES,
          int WARPS, bool UNIFIED, bool WHOLE, class SCORE, class KV>
__device__ void decode_block(const DecodeArguments<SCORE, KV>& p) {
    using Unit = ::Unit<DecodeArguments<SCORE, KV>, BN>;
    constexpr int THREADS = WARPS * 32;
    constexpr int TEAM = PRODUCTS::TEAM, TEAMS = WARPS / TEAM;
    constexpr int TEAM_THREADS = TEAM * 32, WARP_ROWS = BM / TEAM;
    constexpr int MT = WARP_ROWS / 16, NT = BN / 8,
                  OT = HEAD_DIM_V / 8;  // 16-row, 8-key and 8-column pieces
    using QTile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using KTile = SmemTile<BN, HEAD_DIM, sizeof(T)>;
    using VTile = SmemTile<BN, HEAD_DIM_V, sizeof(T)>;
    // float32 products leave O's columns in another order, and need m in the units of S, see
    // products_fp32.cuh and softmax.cuh.
    constexpr bool FP32 = sizeof(T) == 4;
    static_assert(!UNIFIED || (TEAM == 1 && !FP32),
                  "a warp decides alone, on sums of P of 16 bits");
    using Softmax = OnlineSoftmax<MT, FP32>;
    const float scale = SCORE::LINEAR ? p.scale_log2 : 1.f, m_to_log2 = FP32 ? scale : 1.f;
    constexpr int RING = STAGES * (KTile::bytes + VTile::bytes);
    using Piece = Partial<HEAD_DIM_V>;
    using End =
        UnitEnd<T, Softmax, DecodeArguments<SCORE, KV>, BM, HEAD_DIM_V, TEAM, WARPS, TEAMS * RING>;
    constexpr int SUM = QTile::bytes + TEAMS * RING, STATE = SUM + End::SUM_BYTES;

    static_assert(End::SUM_BYTES >= THREADS * 12, "what is looked at once more comes there");

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem);
    float* sSum = reinterpret_cast<float*>(smem + SUM);
    auto* sM = reinterpret_cast<typename End::OfTeams*>(smem + STATE);  // [BM], then as many l
    const uint32_t thread = threadIdx.x;
    const int lane = thread % 32, warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const int team = warp / TEAM,
              first_row = warp % TEAM * WARP_ROWS;  // of this warp's in the tile
    const uint32_t sK = sQ + QTile::bytes + team * RING, sV = sK + STAGES * KTile::bytes;
    const int block = blockIdx.x;
    // With one stage, a tile's K is asked for while V of the one before is taken, and all teams ask
    // at once: memory reads what lies together a little faster, if little else comes in between.
    constexpr bool TOGETHER = STAGES == 1;
    const SCORE& score = p;
    const KV& kv = p;
    auto team_sync = [&] {
        if constexpr (TEAM == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + team, TEAM_THREADS);
    };

    auto of_lane = [](const T* from, int number) {  // that of a lane, in all of the warp
        return reinterpret_cast<const T*>(
            __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(from), number));
    };

    launch_dependents();

    Share<DecodeArguments<SCORE, KV>, BN, TEAMS, WHOLE> share;
    // This team's tile of the share that is asked for next, the unit that it belongs to, and that
    // unit's KV head.
    int asked = 0, kv_head_asked = 0;
    Unit of_asked{};
    // What the table says of the pages of the tiles from there on, looked up at once by the lanes
    // of a warp, of GRAIN keys each; and the place of that tile among them.
    constexpr int GRAIN = KV::template grain<BN>(), GRAINS = BN / GRAIN, LOOKED_UP = 32 / GRAINS;
    static_assert(GRAINS <= 32, "a warp looks up the pages of a tile at once");
    int entries = 0, at_entries = 0;
    auto key_of_lane = [&](int tile) {
        return (tile + lane / GRAINS * TEAMS) * BN + lane % GRAINS * GRAIN;
    };  // a tile of the unit
    auto find_entries = [&](int batch, int tile) -> const int* {
        return KV::PAGED ? kv.entry(batch, min(uint32_t(key_of_lane(tile)), uint32_t(p.seq_kv - 1)))
                         : nullptr;
    };
    auto find_entries_asked = [&] {
        return asked < share.count ? find_entries(of_asked.batch, asked - of_asked.zero) : nullptr;
    };
    auto look_up = [](const int* entry) { return entry ? ld_relaxed(entry) : 0; };
    // Goes to the unit of the tile that is asked for next, from one that is not behind it. One
    // entry may be known.
    auto find_asked = [&](bool looks_up, const int* known = nullptr, int known_entry = 0) {
        if (asked >= of_asked.end() && asked < share.count) {
            do of_asked.next(p);
            while (asked >= of_asked.end());
            kv_head_asked = of_asked.kv_head(p), looks_up = true;
        }
        if (!KV::PAGED || !looks_up) return;
        const int* from = find_entries_asked();
        entries = from == known ? known_entry : look_up(from), at_entries = 0;
    };
    auto ask_from = [&](int first, const Unit& unit, const int* known = nullptr,
                        int known_entry = 0) {
        asked = first, of_asked = unit, kv_head_asked = unit.kv_head(p);
        find_asked(true, known, known_entry);
    };

    auto row = [&](const Tensor& t, int key, int entry) {
        return kv.template row<T>(t, of_asked.batch, kv_head_asked, key, kv.page(entry));
    };
    // Where the grain begins that this lane's entry is of: found for many tiles at once, as that
    // takes many instructions, when the first of them is asked for, since entries take long to
    // come. Tiles of one grain would come later so: they are found one by one.
    const T *k_at = nullptr, *v_at = nullptr;
    auto find_grains = [&] {
        if (GRAIN == BN || at_entries > 0) return;
        const int key = key_of_lane(asked - of_asked.zero);
        k_at = row(p.k, key, entries), v_at = row(p.v, key, entries);
    };

    // Where this thread copies from, of the tile that is asked for next, if that lies in one piece;
    // and row `r` of it otherwise.
    const T *k_from = nullptr, *v_from = nullptr;
    // Memory gives whole rows a little faster, but to warpgroups only those of sixteens that lie
    // anywhere; where each row is found by itself, a thread should have few.
    constexpr bool WHOLE_ROWS = TEAM < 4 ? GRAIN == BN : GRAIN == 16 && GRAIN < BN;
    // A warp copies all of a page, where a tile has as many of them.
    constexpr bool BY_WARP = TEAM == 4 && GRAINS == TEAM;
    using KCopy = TileCopy<KTile, TEAM_THREADS, WHOLE_ROWS, BY_WARP>;
    using VCopy = TileCopy<VTile, TEAM_THREADS, WHOLE_ROWS, BY_WARP>;
    auto source = [&](auto copy, const Tensor& t, const T* at, int r) {  // a row of the tile
        if constexpr (GRAIN < BN) {
            at = of_lane(at, at_entries * GRAINS + r / GRAIN);
        } else {
            at = row(t, (asked - of_asked.zero) * BN,
                     KV::PAGED ? __shfl_sync(0xffffffff, entries, at_entries) : 0);
        }
        return at + copy.chunk(thread) * decltype(copy)::Tile::CHUNK + r % GRAIN * t.stride_seq;
    };
    auto find_sources = [&] {
        find_grains();
        if (GRAIN < BN) return;
        k_from = source(KCopy(), p.k, k_at, KCopy::row(thread)),
        v_from = source(VCopy(), p.v, v_at, VCopy::row(thread));
    };
    // What is read once leaves L2 first, unless other row tiles read it, too: pieces and results
    // stay there, which memory would take in between. Where a whole unit's results are next to
    // nothing, reading is faster without that.
    unsigned long long kept = L2_NORMAL;
    // Starts the copy of K or V of a tile, or of both, and moves on with V. What lies beyond the
    // sequence is not read: zeros stand for it.
    enum { K_ONLY = 1, V_ONLY = 2, BOTH = 3 };
    auto ask = [&](int slot, int what = BOTH, bool found_sources = false) {
        const int keys = of_asked.keys - (asked - of_asked.zero) * BN;
        // Nor is what is in front of all windows: its pages may be others' by now.
        const int before =
            SCORE::LEFT_EDGE ? of_asked.first_key(p) - (asked - of_asked.zero) * BN : 0;
        auto load = [&](auto copy, uint32_t dst, const Tensor& t, const T* at, const T* src,
                        int cols) {
            using Copy = decltype(copy);
            using Tile = typename Copy::Tile;
            const int row = Copy::row(thread), chunk = Copy::chunk(thread);
            const uint32_t first = Tile::place(dst, row, chunk);
#pragma unroll
            for (int r = 0; r < Copy::END; r += Copy::ROWS) {
                if (GRAIN < BN && r % GRAIN == 0) src = source(copy, t, at, r + row);
#pragma unroll
                for (int c = 0; c < Tile::CHUNKS; c += Copy::ACROSS)
                    cp_async_16(Tile::move_on(first, r, c / Tile::PANEL), src + c * Tile::CHUNK,
                                r + row < keys && (!SCORE::LEFT_EDGE || r + row >= before) &&
                                    (c + chunk) * Tile::CHUNK < cols,
                                kept);
                src += Copy::ROWS * t.stride_seq;
            }
        };
        if (asked < share.count) {
            if (what & K_ONLY) {
                if (!found_sources) find_sources();
                load(KCopy(), sK + slot * KTile::bytes, p.k, k_at, k_from, p.head_dim);
                cp_async_commit();
            }
            if (what & V_ONLY) {
                load(VCopy(), sV + slot * VTile::bytes, p.v, v_at, v_from, p.head_dim_v);
                cp_async_commit();
                asked += TEAMS, ++at_entries;
                find_asked(at_entries == LOOKED_UP);
            }
        } else {
            if (what & K_ONLY) cp_async_commit();
            if (what & V_ONLY) cp_async_commit();
        }
    };

    // Q of the first unit is copied in front of the keys, behind which it would come late. So that
    // of another is fetched one unit ahead, into registers, if they are few.
    constexpr int PER_THREAD = (BM * QTile::CHUNKS + THREADS - 1) / THREADS;
    constexpr bool AHEAD = PER_THREAD <= 2;
    float4 q_next[AHEAD ? PER_THREAD : 1];
    const float4* q_from[AHEAD ? PER_THREAD : 1];
    auto find_q = [&](const UnitRows& at, int i) -> const float4* {
        const int row = (thread + i * THREADS) / QTile::CHUNKS,
                  chunk = (thread + i * THREADS) % QTile::CHUNKS;
        if (row >= at.rows || chunk * QTile::CHUNK >= p.head_dim) return nullptr;
        return reinterpret_cast<const float4*>(at.template of<T>(p, p.q, row) +
                                               chunk * QTile::CHUNK);
    };
    auto for_each_of_q = [&](auto function) {
#pragma unroll 4
        for (int i = 0; i < PER_THREAD; ++i) {
            const int row = (thread + i * THREADS) / QTile::CHUNKS,
                      chunk = (thread + i * THREADS) % QTile::CHUNKS;
            if (row < BM) function(i, sQ + QTile::offset(row, chunk));
        }
    };
    auto fetched_q = [](const float4* from) {
        return from ? *from : make_float4(0.f, 0.f, 0.f, 0.f);
    };
    auto find_next_q = [&](const UnitRows& rows) {
#pragma unroll
        for (int i = 0; i < (AHEAD ? PER_THREAD : 0); ++i)
            q_from[i] = find_q(rows, i), computed_here(q_from[i]);
    };
    // While the kernel in front still runs: in front of keys, of which some are in L2 by then, Q
    // would come last. Of many rows it would take long to find.
    auto fetch_q_ahead = [&] {
#pragma unroll
        for (int i = 0; i < (AHEAD ? PER_THREAD : 0); ++i)
            if (q_from[i]) prefetch_l2(q_from[i]);
    };
    auto copy_q = [&](const UnitRows& rows) {
        for_each_of_q([&](int i, uint32_t place) {
            const float4* from = AHEAD ? q_from[i] : find_q(rows, i);
            cp_async_16(place, from, from != nullptr);
        });
    };

    // While the kernel in front still runs, L2 gets some of this team's first keys, 4 KB a warp or
    // eight keys; or its first tile, if no team has two. If all teams had a tile there, memory
    // would stand still while that comes from L2, and what the kernel in front merges would come
    // late. Where units are whole and have few rows, it would take what others still read. Keys
    // that are not adjacent in a page are not fetched where a tile has several pages.
    auto fetch_ahead = [&] {
        constexpr int OF_4_KB = (4 << 10) * TEAM / ((HEAD_DIM + HEAD_DIM_V) * int(sizeof(T))),
                      SOME = OF_4_KB > 8 ? OF_4_KB : 8;
        if (warp % TEAM > 0 || asked >= share.count) return;
        const int most = share.count > TEAMS && SOME < BN ? SOME : BN;
        const int keys = min(most, of_asked.keys - (asked - of_asked.zero) * BN);
        auto fetch = [&](const T* from, const Tensor& t, int cols) {
            const bool adjacent = t.stride_seq == cols;
            int rows = lane < keys;
            if (GRAIN < BN)  // each lane has a grain
                rows = adjacent ? min(GRAIN, keys - lane * GRAIN) : 0;
            else if (adjacent)
                rows = lane == 0 ? keys : 0;
            // ptxas takes the warp for divergent without a shuffle here.
            if (GRAIN == BN) from = of_lane(from, 0) + (adjacent ? 0 : lane * t.stride_seq);
            const int bytes = rows * cols * int(sizeof(T)) / 16 * 16;
            if (bytes > 0) prefetch_l2(from, bytes);
        };
        fetch(GRAIN < BN ? k_at : k_from, p.k, p.head_dim),
            fetch(GRAIN < BN ? v_at : v_from, p.v, p.head_dim_v);
    };

    // The share is found before the kernel in front has ended, and again if lengths or the table
    // are others then. Of many sequences it is only guessed, from the own one.
    UnitRows first_rows(p, share.unit, BM);
    auto first_pieces = share.pieces(p, share.unit, block);
    for (bool begun = false;; begun = true) {
        Lengths<DecodeArguments<SCORE, KV>, BN, TEAMS, WARPS, WHOLE> lengths(p);
        // Where a block has a whole unit, its pages are looked up beside its length, unless that
        // says where they begin.
        const bool whole_unit = !SCORE::LEFT_EDGE && (WHOLE || p.parts.divisor == 1);
        const int* known =
            whole_unit ? find_entries(min(p.units.quotient(block), p.batch - 1), team) : nullptr;
        const int known_entry = look_up(known);
        share.find(p, block, keys_of_length(p, lengths.length), begun),
            ask_from(team, share.unit, known, known_entry);
        // All warps or none: what follows has barriers, and each may have read another length.
        const bool guesses =
            WHOLE || lengths.few || begun || p.splits || !__syncthreads_or(!share.is_even());
        const int first_entries = entries, *first_entry = find_entries_asked();
        first_rows = UnitRows(p, share.unit, BM), first_pieces = share.pieces(p, share.unit, block);
        const bool once =
            !first_pieces.one() || share.unit.tiles * BN < 1024 * max(first_rows.rows, 4);
        kept = p.row_tiles.divisor == 1 && once ? L2_READ_ONCE : L2_NORMAL;
        find_next_q(first_rows), find_sources(), lengths.find_again(p, share.unit.batch);
        if (!begun) fetch_q_ahead();
        if (!begun && lengths.few && (TEAM == 4 || p.parts.divisor > 1)) fetch_ahead();
        computed_here(k_from), computed_here(v_from), computed_here(first_entry);
        computed_here(first_pieces.begin), computed_here(first_pieces.end);
        if (!begun) {
            wait_for_kernel_in_front(share.count);
            if (!guesses) continue;
        }
        copy_q(first_rows), lengths.look_again(p, sQ + SUM + thread * 12);
        if (KV::PAGED) cp_async_4(sQ + SUM + thread * 12 + 8, first_entry, first_entry != nullptr);
        cp_async_commit();
        // In front of a loop with loads, as those from the table, the compiler waits for all
        // before.
        if (KV::PAGED) ask(0, BOTH, true);
#pragma unroll 1
        for (int i = KV::PAGED; i < STAGES; ++i) ask(i, BOTH, i == 0);
        if (begun) break;
        cp_async_wait<2 * STAGES>();
        const int* looked_at = reinterpret_cast<const int*>(sSum) + thread * 3;
        lengths.have_come(p, looked_at);
        bool holds = lengths.hold(p, share, reinterpret_cast<int (*)[2]>(sM)) &&
                     (!KV::PAGED || looked_at[2] == first_entries);
        // Where the own length has changed, too, a share of the same tiles is the same, if those on
        // their way are whole.
        const int keys_now = lengths.keys_now(p, share.unit.batch);
        if (share.unit.tiles > 0 && keys_now != share.unit.keys) {
            const int whole = share.unit.zero + min(keys_now, share.unit.keys) / BN;
            holds = holds && share.unit.is_same_with(p, keys_now) && asked - TEAMS < whole;
            if constexpr (SCORE::LEFT_EDGE)
                holds = holds && (team - share.unit.zero) * BN >=
                                     Unit::first_key_of(p, max(keys_now, share.unit.keys));
            share.unit.keys = of_asked.keys = keys_now;
        }
        if (__all_sync(0xffffffff, holds)) break;
        cp_async_wait<0>();
    }
    if (share.count <= 0) {
        cp_async_wait<0>();  // Q and lengths may be on their way to shared memory, which is the
                             // next block's then
        return;
    }

    const RowWriter<T, Softmax, DecodeArguments<SCORE, KV>> writer{p, m_to_log2};
    const End unit_end{writer, sSum, sM, sM + BM, reinterpret_cast<T**>(smem)};
    const MergingBlocks<WARPS, HEAD_DIM_V> merging(Piece(p, first_pieces.begin, BM), block,
                                                   first_pieces.end,
                                                   first_rows.rows * Piece::PARTS > WARPS);
    merging.begin();
    // Whether some row's sum is not what P of 16 bits, with a preset maximum, adds up exactly
    // enough.
    auto out_of_range = [&](const Softmax& softmax, int rows, int keys) {
        const float most = Unified<T>::MOST_SUM,
                    least = fmaxf(Unified<T>::LEAST_SUM, keys * Unified<T>::LEAST_MEAN);
        bool found = false;
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const float l = lanes_sum<4>(softmax.l[i / 2][i % 2]);
            found |= i * 8 + lane / 4 < rows && !(l >= least && l <= most);
        }
        return __any_sync(0xffffffff, found) != 0;
    };
    int slot = 0, at = team;  // this team's tile of the share that is computed next
    bool first = true;
    auto pieces = first_pieces;
    for (Unit unit = share.unit;;) {
        const UnitRows tile(p, unit, BM);
        const int rows = tile.rows;
        const Sequence sequence{p.seq_q, unit.keys};
        const bool last = WHOLE || unit.end() >= share.count;
        Unit next = unit;
        if (!last) next.next(p);

        if (first) {
            cp_async_wait<2 * STAGES>();
        } else {
            __syncthreads();
            for_each_of_q([&](int i, uint32_t place) {
                sts_128(place, AHEAD ? q_next[i] : fetched_q(find_q(tile, i)));
            });
        }
        if (AHEAD && !last) {
            find_next_q(UnitRows(p, next, BM));
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) q_next[i] = fetched_q(q_from[i]);
        }
        PRODUCTS::written();
        __syncthreads();

        // Tiles of keys that all rows see
        const int whole_end = score.sees(sequence, tile.query(p, 0)).end / BN;
        const int whole_first =
            SCORE::LEFT_EDGE
                ? (max(0, score.sees(sequence, tile.query(p, rows - 1)).first) + BN - 1) / BN
                : 0;
        Softmax softmax(scale);
        float rO[MT][OT][4] = {};
        const int at_begin = at, at_end = min(unit.end(), share.count);
        if (UNIFIED && at < at_end) softmax.fix(p.unified_max);
        const int unit_begin = max(unit.begin(), 0);
        auto attend = [&](bool exact, bool alone = false) {
            // All teams ask at once for what lies together, if each has some of it.
            auto wait_for_all = [&] {
                if (TOGETHER && !alone && at - team >= unit_begin && at - team + TEAMS <= at_end)
                    named_barrier_sync(15, THREADS);
            };
            for (; at < at_end; at += TEAMS) {
                const int j = at - unit.zero;
                // S = Q K^T
                cp_async_wait<2 * STAGES - 1>();
                PRODUCTS::written();
                team_sync();
                float rS[MT][NT][4] = {};
                const uint32_t tile_k = sK + slot * KTile::bytes, tile_v = sV + slot * VTile::bytes;
                PRODUCTS::template qk<T, QTile, KTile>(rS, sQ, tile_k, first_row);
                if (TOGETHER) team_sync(), wait_for_all(), ask(slot, K_ONLY);

                // P = exp(S - m); m, l and O follow
                const GroupedAt rows_at{lane,       tile.first + first_row, j * BN, p.group,
                                        tile.batch, tile.first_head};
                score.apply(rS, sequence, p.scale_log2, rows_at,
                            {j >= whole_end, SCORE::LEFT_EDGE && j < whole_first});
                if (exact)
                    softmax.update(rS, rO);
                else
                    softmax.exponentiate(rS);

                // O += P V
                cp_async_wait<2 * STAGES - (TOGETHER ? 1 : 2)>();
                PRODUCTS::written();
                team_sync();
                PRODUCTS::template pv<T, VTile>(rO, rS, tile_v);
                team_sync(), wait_for_all();
                ask(slot, TOGETHER ? V_ONLY : BOTH);
                slot = slot == STAGES - 1 ? 0 : slot + 1;
            }
        };
        attend(!UNIFIED);
        if constexpr (UNIFIED) {
            // Where sums are out of the range in which P is exact enough, these keys are read and
            // taken again, with maxima.
            if (at_begin < at_end && unit.keys > 0 &&
                out_of_range(softmax, rows, (at_end - at_begin + TEAMS - 1) / TEAMS * BN)) {
                if (lane == 0) atomicAdd(&decode_recomputed, 1);
                cp_async_wait<0>();
                __syncwarp();
                at = at_begin, slot = 0;
                ask_from(at_begin, unit);
#pragma unroll 1
                for (int i = 0; i < STAGES; ++i) ask(i);
                softmax.reset();
#pragma unroll
                for (int i = 0; i < MT * OT * 4; ++i)
                    rO[i / 4 / OT][i / 4 % OT][i % 4] = zero_anew();
                attend(true, true);
            }
        }

        const Piece partial(p, pieces.begin, BM);
        const bool one = pieces.one();

        unit_end.hand_on(rO, softmax, tile, partial, block, one, last, warp, lane);
        if (last) break;
        unit = next, pieces = share.pieces(p, unit, block), first = false;
    }
    cp_async_wait<0>();

    // All other units are done by now, and so are those of the blocks that this one waits for, or
    // nearly so.
    if (block == first_pieces.begin) return;
    auto place = [&](int row, int col) { return first_rows.template of<T>(p, p.o, row) + col; };
    auto write_two = [&](T* of_row, int row, int col, float2 o, float m, float l) {
        const float two[2] = {o.x, o.y};
        writer.write(first_rows, row, col, of_row, two, m, l);
    };
    const int rows = first_rows.rows, n = first_pieces.end - first_pieces.begin;
    // Chosen in front of the shares: inside, ptxas takes warps for divergent. Few rows of few
    // columns whose rings have more stages than one are of short units, whose pieces are many.
    constexpr bool MAY_BE_FEW = End::MANY || HEAD_DIM_V > 128 || STAGES == 1;
    if (MAY_BE_FEW && n == 2)
        merging.each_share([&](int share, int shares) {
            merge_few_pieces<WARPS, End::MANY ? 4 : 1, 2>(merging.partial, n, rows, share, shares,
                                                          m_to_log2, place, write_two);
        });
    else if (MAY_BE_FEW && n <= 4)
        merging.each_share([&](int share, int shares) {
            merge_few_pieces<WARPS, End::MANY ? 2 : 1, 4>(merging.partial, n, rows, share, shares,
                                                          m_to_log2, place, write_two);
        });
    else
        merging.each_share([&](int share, int shares) {
            merge_pieces<WARPS, End::MANY ? 2 : 1>(merging.partial, merging.end, rows, share,
                                                   shares, m_to_log2, place, write_two);
        });
}

// A block of flash-decoding (Dao et al. 2023): attention of few queries to many keys, which reads K
// and V once, at the speed of memory. The kernels that decode run it, each with its products.
// All keys are shared out evenly among the blocks, see decode_scheduler.cuh. The query heads that
// share a KV head are the rows of one tile, as in the flat product of flash-decoding++ (Hong et al.
// 2023). The teams of a block, of one warp or several, take tiles of BN keys in turn, each through
// a ring of its own, filled by cp.async: in the main loop no team waits for another. Where a unit
// ends, its teams' O are added up; if the unit was cut, the last of its blocks merges the pieces.
// Calls are short, and nothing hides the latency of code that runs once: it is written for few
// instructions.
#pragma once
#include "decode_start.cuh"

// The unified maximum of flash-decoding++ (section 3): P = exp(S - m) with one preset m for all.
// Row sums between which P is exact enough, and the least mean of P: float16 ends at 65504, and
// loses digits below 2^-14.
template <class T>
struct Unified {
    static constexpr float MOST_SUM = 0x1p15f, LEAST_SUM = 0x1p-6f, LEAST_MEAN = 0x1p-15f;
};
template <>
struct Unified<bfloat16> {  // it has the range of float32
    static constexpr float MOST_SUM = 0x1p64f, LEAST_SUM = 0x1p-64f, LEAST_MEAN = 0.f;
};
// How many times a warp has found sums out of range, and taken its keys of a unit again.
extern "C" __device__ int decode_recomputed = 0;

// A block at work: it finds its share of the keys; for each unit there it loads Q, attends to its
// tiles of keys, and writes O or leaves a piece; then it merges pieces. C is the DecodeConfig.
template <class C>
struct DecodeBlock {
    using T = typename C::T;
    using SCORE = typename C::SCORE;
    using ARGUMENTS = typename C::ARGUMENTS;
    using PRODUCTS = typename C::PRODUCTS;
    using Unit = typename C::Unit;
    using Softmax = typename C::Softmax;
    using Values = typename C::Values;
    using Piece = typename C::Piece;
    using End = typename C::End;
    using Keys = TeamKeys<C>;
    using Merging = MergingBlocks<C::WARPS, C::HEAD_DIM_V>;
    using Output = float[C::MT][C::OT][4];
    static constexpr int BM = C::BM, BN = C::BN, TEAM = C::TEAM, TEAMS = C::TEAMS;
    static constexpr int STAGES = C::STAGES;
    static constexpr bool WHOLE = C::WHOLE, UNIFIED = C::UNIFIED, TOGETHER = C::TOGETHER;

    // A unit, its rows, and its sequence. Its tiles [first, end) are numbered as in the share, and
    // those that all rows see as in the sequence.
    struct Work {
        const Unit& unit;
        const UnitRows& rows;
        const Sequence sequence;
        const KeyTiles tiles;
    };

    const ARGUMENTS& p;
    const float scale, m_to_log2;
    unsigned char* const smem;
    const uint32_t sQ, thread;
    const int lane, warp, team, block;
    Keys keys;
    FirstUnit<C> first;
    typename C::Factors factors;
    int slot = 0, at;  // where this team's next tile is in its ring, and in the share

    __device__ DecodeBlock(const ARGUMENTS& p, unsigned char* smem)
        : p(p),
          scale(SCORE::LINEAR ? p.scale_log2 : 1.f),
          m_to_log2(C::FP32 ? scale : 1.f),
          smem(smem),
          sQ(smem_address(smem)),
          thread(threadIdx.x),
          lane(thread % 32),
          warp(__shfl_sync(0xffffffff, thread / 32, 0)),
          team(warp / TEAM),
          block(blockIdx.x),
          keys(p, thread, sQ + C::Q_BYTES + team * C::RING),
          first(p, smem, thread, warp, block, keys.share),
          at(team) {}

    __device__ void run() {
        launch_dependents();
        UnitQuery<C> query(p, thread, sQ);
        first.begin(keys, query);
        if (keys.share.count <= 0) {
            // Q and lengths may be on their way to shared memory, which is soon the next block's.
            cp_async_wait<0>();
            return;
        }
        const Merging merging(Piece(p, first.pieces.begin, BM), block, first.pieces.end,
                              first.rows.rows * Piece::PARTS > C::WARPS);
        merging.begin();
        const End unit_end{writer(), sums(), maxima(), maxima() + BM, reinterpret_cast<T**>(smem)};
        Pieces pieces = first.pieces;
        bool is_first = true;
        for (Unit unit = keys.share.unit;;) {
            const UnitRows rows(p, unit, BM);
            const bool last = WHOLE || unit.end() >= keys.share.count;
            Unit next = unit;
            if (!last) next.next(p);
            load_query(query, rows, next, is_first, last);

            Softmax softmax(scale);
            Values values;
            Output rO = {};
            const Sequence sequence{p.seq_q, unit.keys};
            const Work work{unit, rows, sequence, tiles_of(unit, rows, sequence)};
            if constexpr (UNIFIED)
                attend_with_preset_maximum(softmax, values, rO, work);
            else
                attend(softmax, values, rO, work, true);
            values.conclude(rO);

            unit_end.hand_on(rO, softmax, rows, Piece(p, pieces.begin, BM), block, pieces.one(),
                             last, warp, lane);
            if (last) break;
            unit = next, pieces = keys.share.pieces(p, unit, block), is_first = false;
        }
        cp_async_wait<0>();
        // All other units are done by now, and so are those of the blocks that this one waits for,
        // or nearly so.
        if (block != first.pieces.begin) merge(merging);
    }

 private:
    // The main loop, over this team's tiles of a unit. `exact`: row maxima are kept. `alone`: the
    // other teams do not take part, so that no barrier waits for them.
    __device__ void attend(Softmax& softmax, Values& values, Output& rO, const Work& work,
                           bool exact, bool alone = false) {
        const SCORE& score = p;
        const int first_row = warp % TEAM * C::WARP_ROWS;  // this warp's in the tile
        // All teams ask at once for what lies together, if each has some of it.
        auto wait_for_all = [&] {
            if (TOGETHER && !alone && at - team >= work.tiles.first &&
                at - team + TEAMS <= work.tiles.end)
                named_barrier_sync(15, C::THREADS);
        };
        for (; at < work.tiles.end; at += TEAMS) {
            const int j = at - work.unit.zero;
            // S = Q K^T
            cp_async_wait<2 * STAGES - 1>();
            PRODUCTS::written();
            team_sync();
            float rS[C::MT][C::NT][4] = {};
            const uint32_t tile_k = keys.sK + slot * C::KTile::bytes,
                           tile_v = keys.sV + slot * C::VTile::bytes;
            if constexpr (C::INTEGERS)
                PRODUCTS::template qk<T, typename C::QTile, typename C::KTile>(
                    rS, factors, sQ, tile_k, first_row, work.rows.rows);
            else
                PRODUCTS::template qk<T, typename C::QTile, typename C::KTile>(rS, sQ, tile_k,
                                                                               first_row);
            if constexpr (C::SCALED) scale_columns(rS, keys.k_scales(slot) + lane % 4 * 8);
            if (TOGETHER) team_sync(), wait_for_all(), keys.ask(slot, Keys::K_ONLY);

            // P = exp(S - m); m, l and O follow
            const GroupedAt rows_at{lane,
                                    work.rows.first + first_row,
                                    j * BN,
                                    p.group,
                                    work.rows.batch,
                                    work.rows.first_head};
            score.apply(rS, work.sequence, p.scale_log2, rows_at, SCORE::masked(work.tiles, j));
            if (exact)
                softmax.update(rS, rO);
            else
                softmax.exponentiate(rS);

            // O += P V
            cp_async_wait<2 * STAGES - (TOGETHER ? 1 : 2)>();
            PRODUCTS::written();
            team_sync();
            if constexpr (C::SCALED) values.scale(rS, rO, keys.v_scales(slot) + lane % 4 * 8);
            PRODUCTS::template pv<T, typename C::VTile>(rO, rS, tile_v);
            team_sync(), wait_for_all();
            keys.ask(slot, TOGETHER ? Keys::V_ONLY : Keys::BOTH);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }
    // The same with the preset maximum. Where sums leave the range in which P is exact enough, this
    // warp reads and takes its keys again, with maxima.
    __device__ void attend_with_preset_maximum(Softmax& softmax, Values& values, Output& rO,
                                               const Work& work) {
        const int at_begin = at, at_end = work.tiles.end;
        if (at < at_end) softmax.fix(p.unified_max);
        attend(softmax, values, rO, work, false);
        if (at_begin >= at_end || work.unit.keys <= 0 ||
            !out_of_range(softmax, work.rows.rows, (at_end - at_begin + TEAMS - 1) / TEAMS * BN))
            return;
        if (lane == 0) atomicAdd(&decode_recomputed, 1);
        cp_async_wait<0>();
        __syncwarp();
        at = at_begin, slot = 0;
        keys.ask_from(at_begin, work.unit);
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) keys.ask(i);
        softmax.reset();
#pragma unroll
        for (int i = 0; i < C::MT * C::OT * 4; ++i)
            rO[i / 4 / C::OT][i / 4 % C::OT][i % 4] = opaque_zero();
        attend(softmax, values, rO, work, true, true);
    }
    // Whether P of 16 bits, with a preset maximum, does not add up exactly enough in some row.
    __device__ bool out_of_range(const Softmax& softmax, int rows, int keys) const {
        const float most = Unified<T>::MOST_SUM,
                    least = fmaxf(Unified<T>::LEAST_SUM, keys * Unified<T>::LEAST_MEAN);
        bool found = false;
#pragma unroll
        for (int i = 0; i < C::MT * 2; ++i) {
            const float l = lanes_sum<4>(softmax.l[i / 2][i % 2]);
            found |= i * 8 + lane / 4 < rows && !(l >= least && l <= most);
        }
        return __any_sync(0xffffffff, found) != 0;
    }

    // Q of a unit to shared memory, and of the next one to registers, if it is fetched ahead.
    __device__ void load_query(UnitQuery<C>& query, const UnitRows& rows, const Unit& next,
                               bool is_first, bool last) {
        if (is_first) {
            cp_async_wait<2 * STAGES>();
        } else {
            __syncthreads();
            query.put(rows);
        }
        if (query.AHEAD && !last) query.fetch(UnitRows(p, next, BM));
        PRODUCTS::written();
        __syncthreads();
        if constexpr (C::INTEGERS) {
            const int first_row = warp % TEAM * C::WARP_ROWS;
            factors.find(sQ, first_row, rows.rows, lane);
            __syncthreads();
            factors.template split<TEAMS>(sQ, first_row, rows.rows, team, lane);
            __syncthreads();
        }
    }
    __device__ KeyTiles tiles_of(const Unit& unit, const UnitRows& rows,
                                 const Sequence& sequence) const {
        const SCORE& score = p;
        const int whole_end = score.sees(sequence, rows.query(p, 0)).end / BN;
        const int whole_first =
            SCORE::LEFT_EDGE
                ? (max(0, score.sees(sequence, rows.query(p, rows.rows - 1)).first) + BN - 1) / BN
                : 0;
        return {max(unit.begin(), 0), min(unit.end(), keys.share.count), whole_first, whole_end};
    }
    __device__ void team_sync() const {
        if constexpr (TEAM == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + team, C::TEAM_THREADS);
    }
    __device__ float* sums() const { return reinterpret_cast<float*>(smem + C::SUM); }
    __device__ typename End::OfTeams* maxima() const {  // [BM], then as many l
        return reinterpret_cast<typename End::OfTeams*>(smem + C::STATE);
    }
    __device__ RowWriter<T, Softmax, ARGUMENTS> writer() const { return {p, m_to_log2}; }

    // Merges the pieces of the first unit.
    __device__ void merge(const Merging& merging) const {
        auto place = [&](int row, int col) { return first.rows.template of<T>(p, p.o, row) + col; };
        auto write_two = [&](T* of_row, int row, int col, float2 o, float m, float l) {
            const float two[2] = {o.x, o.y};
            writer().write(first.rows, row, col, of_row, two, m, l);
        };
        const int rows = first.rows.rows, n = first.pieces.end - first.pieces.begin;
        // Chosen in front of the shares: inside, ptxas takes warps for divergent. With few rows,
        // few columns and rings of several stages, units are short and have many pieces.
        constexpr bool MAY_BE_FEW = End::MANY || C::HEAD_DIM_V > 128 || STAGES == 1;
        if (MAY_BE_FEW && n == 2)
            merging.each_share([&](int share, int shares) {
                merge_few_pieces<C::WARPS, End::MANY ? 4 : 1, 2>(
                    merging.partial, n, rows, share, shares, m_to_log2, place, write_two);
            });
        else if (MAY_BE_FEW && n <= 4)
            merging.each_share([&](int share, int shares) {
                merge_few_pieces<C::WARPS, End::MANY ? 2 : 1, 4>(
                    merging.partial, n, rows, share, shares, m_to_log2, place, write_two);
            });
        else
            merging.each_share([&](int share, int shares) {
                merge_pieces<C::WARPS, End::MANY ? 2 : 1>(merging.partial, merging.end, rows, share,
                                                          shares, m_to_log2, place, write_two);
            });
    }
};

// With WHOLE, each block has a unit to itself: nothing is cut, and nothing is merged. PRODUCTS has
// the elements of K and V, and whether these are SCALED; the number of warps in a team, which share
// a ring and have as many rows each; `written`, which a thread calls before others use what it has
// written to shared memory; and a warp's S = Q K^T and O += P V.
template <class PRODUCTS, class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES,
          int WARPS, bool UNIFIED, bool WHOLE, class SCORE, class KV, class PARAMS>
__device__ void decode_block(const DecodeArguments<SCORE, KV, PARAMS>& p) {
    using C = DecodeConfig<PRODUCTS, T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, UNIFIED, WHOLE,
                           SCORE, KV, PARAMS>;
    extern __shared__ __align__(1024) unsigned char smem[];
    DecodeBlock<C>(p, smem).run();
}

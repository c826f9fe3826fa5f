// The part that bwd_mma.cu and bwd_fp32.cu share: which keys a block works on, which rows it
// visits, the ring through which Q and dO arrive, and all that is not a product.
#pragma once
#include "bwd_place.cuh"
#include "ptx.cuh"
#include "ptx_reduce.cuh"
#include "score_slope.cuh"
#include "tile.cuh"

// A block computes dK and dV of BN keys of one head of K and V: it loops over the query heads of
// the group, and over the tiles of BM rows that see some of the keys. K and V stay in shared
// memory; Q and dO pass through a ring of STAGES, 1 or 2, by cp.async.
//
// Scores are transposed: a warp owns keys, the rows of its accumulators, and their columns are
// queries. P^T and dS^T are then operands of dV += P^T dO and dK += dS^T Q where they are, in
// registers; dQ += dS K takes dS from shared memory.
//
// Where a warp has no room for both dK and dV of its keys, two share them: the first half of the
// warps has dV, and computes dQ while the second half, which has dK, computes that.
template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, class SCORE,
          class KV>
struct BackwardBlock : KeyPlace<BM, BN, SCORE, KV> {
    static constexpr int THREADS = WARPS * 32;
    static constexpr bool SHARES = HEAD_DIM + HEAD_DIM_V > (sizeof(T) == 4 ? 96 : 320);
    static constexpr int KEY_WARPS = SHARES ? WARPS / 2 : WARPS;
    static constexpr int MT = BN / KEY_WARPS / 16;  // 16-key pieces of a warp
    static constexpr int NT = BM / 8;               // 8-row pieces of a tile of rows
    using KTile = SmemTile<BN, HEAD_DIM, sizeof(T)>;
    using VTile = SmemTile<BN, HEAD_DIM_V, sizeof(T)>;
    using QTile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using OTile = SmemTile<BM, HEAD_DIM_V, sizeof(T)>;
    static_assert(ROW_UNIT % BM == 0 && BM % 16 == 0, "tiles of rows are in one unit");
    static_assert(STAGES == 1 || STAGES == 2, "one tile is on its way at most");

    using Place = KeyPlace<BM, BN, SCORE, KV>;
    using Place::batch;
    using Place::head_kv;
    using Place::is_partial;
    using Place::key_tile;
    using Place::keys_of;
    using Place::p;
    using Place::rank;
    using Place::sequence;
    using Place::turn;
    using Place::visits;
    const uint32_t smem;
    const int number;  // in which blocks begin

    __device__ BackwardBlock(const BackwardArguments<SCORE, KV>& p, unsigned char* smem)
        : BackwardBlock(p, smem, number_of_block(p, smem)) {}

    // Where things are in shared memory. The tile of dS takes what is behind the ring.
    static constexpr uint32_t ROWS_BYTES = 2 * BM * sizeof(float);
    static constexpr uint32_t STAGE_BYTES = QTile::bytes + OTile::bytes + ROWS_BYTES;
    __device__ uint32_t tile_k() const { return smem; }
    __device__ uint32_t tile_v() const { return smem + KTile::bytes; }
    __device__ uint32_t tile_q(int stage) const {
        return smem + KTile::bytes + VTile::bytes + stage * (QTile::bytes + OTile::bytes);
    }
    __device__ uint32_t tile_do(int stage) const { return tile_q(stage) + QTile::bytes; }
    __device__ uint32_t tile_ds() const { return tile_q(STAGES); }
    __device__ uint32_t rows(int stage) const {
        return tile_ds() + BM * BN * sizeof(T) + stage * ROWS_BYTES;
    }

    // The warp's first key, counted from the tile's; and which gradients are its part.
    __device__ static int key0() { return warp_row<BN, KEY_WARPS>(); }
    __device__ static bool has_dv() { return !SHARES || thread_index() / 32 < KEY_WARPS; }
    __device__ static bool has_dk() { return !SHARES || thread_index() / 32 >= KEY_WARPS; }

    // Starts the copies of K and V, and of the first tile of rows.
    __device__ void start(const RowTile& t) const {
        const TileLoader<KTile, THREADS, T> load_k{
            KV::template rows<T>(p.k, batch, head_kv) + sequence.first_k * p.k.stride_seq,
            p.k.stride_seq, sequence.seq_kv, p.head_dim};
        const TileLoader<VTile, THREADS, T> load_v{
            KV::template rows<T>(p.v, batch, head_kv) + sequence.first_k * p.v.stride_seq,
            p.v.stride_seq, sequence.seq_kv, p.head_dim_v};
        load_k.start(tile_k(), key_tile * BN, load_k.source(key_tile * BN));
        load_v.start(tile_v(), key_tile * BN, load_v.source(key_tile * BN));
        load(t, 0);
        if constexpr (Of::IN_TURN)
            static_cast<const InTurn&>(p).begin(batch, head_kv, key_tile, number);
    }
    // Lets the next block add to sums whose order is fixed.
    __device__ void end_sums() const {
        if constexpr (Of::IN_TURN)
            static_cast<const InTurn&>(p).end(batch, head_kv, key_tile, number);
    }
    // Waits for the tile of a stage. Every warp is then done with the one before, whose place is
    // filled again.
    __device__ void next(const RowTile& following, int stage) const {
        cp_async_wait<0>();
        __syncthreads();
        if (STAGES == 2) load(following, 1 - stage);
    }
    // Waits until dS is whole. Where there is one stage, nobody needs Q and dO of it any more.
    __device__ void exchange(const RowTile& following) const {
        __syncthreads();
        if (STAGES == 1 && !SHARES) load(following, 0);
    }
    // The same behind dK, where warps share keys.
    __device__ void release(const RowTile& following) const {
        if constexpr (STAGES == 1 && SHARES) {
            __syncthreads();
            load(following, 0);
        }
    }

    // S^T -> P^T = exp(S^T - LSE) in place; and the derivative of scores, where that is not 1, or
    // S^T itself where gradients of arrays are added up.
    using Of = Differentiated<SCORE>;
    struct Slopes {
        float x[MT][Of::HAS_SLOPE || Of::HAS_SUMS ? NT : 1][4];
    };
    __device__ void weigh(float (&rS)[MT][NT][4], Slopes& slopes, const RowTile& t,
                          int stage) const {
        const Of score{p};
        const int q0 = t.tile * BM, lane = thread_index() % 32, head = head_kv * p.group + t.head;
        const KeyTiles keys = keys_of(t.tile);
        const bool masked = key_tile < keys.whole_first || key_tile >= keys.whole_end;
        const bool asks = SCORE::PAIRWISE && (!SCORE::MAPPED || is_partial(t));
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const float2 lse = lds_2(rows(stage) + (nt * 8 + lane % 4 * 2) * 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int query = q0 + nt * 8 + lane % 4 * 2 + i;
                Keys seen{0, 0x7fffffff};
                if (masked) seen = static_cast<const SCORE&>(p).sees(sequence, query);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int key = key_of(mt, h, lane);
                        float& s = rS[mt][nt][2 * h + i];
                        const float of_row = i ? lse.y : lse.x;
                        if constexpr (SCORE::CHANGES_EVERY_TILE) {
                            const Pair pair{sequence, batch, head, min(query, sequence.seq_q - 1),
                                            min(key, sequence.seq_kv - 1)};
                            float slope;
                            if constexpr (Of::HAS_SUMS) slopes.x[mt][nt][2 * h + i] = s;
                            s = score.of(s, p.scale_log2, pair, slope);
                            // In log2 units, the LSE is not rounded: with large scores, whole
                            // rows of weights would be wrong by as much.
                            s = exp2_approx(SCORE::NATURAL ? (s - of_row) * LOG2_E
                                                           : fmaf(-of_row, LOG2_E, s));
                            if constexpr (Of::HAS_SLOPE && !Of::HAS_SUMS)
                                slopes.x[mt][nt][2 * h + i] = slope;
                            if (asks) set_if_equal(s, score.hides(pair), true, 0.f);
                        } else {
                            s = exp2_approx(fmaf(s, p.scale_log2, -(of_row * LOG2_E)));
                        }
                        set_if_less(s, seen.end - 1, key, 0.f);
                        if (SCORE::LEFT_EDGE) set_if_less(s, key, seen.first, 0.f);
                    }
            }
        }
    }
    // dP^T -> dS^T = P^T (dP^T - delta) in place. Weights that are dropped are then no longer in
    // P^T. The others should be `growth` times as large: so is dV in the end.
    __device__ void differentiate(float (&rdP)[MT][NT][4], const float (&rP)[MT][NT][4],
                                  const Slopes& slopes, const RowTile& t, int stage) const {
        if constexpr (Of::WARPS_IN_TURN) {
            for (int warp = 0; warp < KEY_WARPS; ++warp) {
                if (thread_index() / 32 % KEY_WARPS == warp)
                    differentiate_warp(rdP, rP, slopes, t, stage);
                named_barrier_sync(1, KEY_WARPS * 32);
            }
        } else {
            differentiate_warp(rdP, rP, slopes, t, stage);
        }
    }
    // The weights that are left.
    __device__ void drop(float (&rP)[MT][NT][4], const RowTile& t) const {
        if constexpr (SCORE::DROPS_WEIGHTS) {
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) drop(rP, t, nt, mt, 1.f);
        }
    }

    // Adds to dQ of 16 rows, from `row` of the tile on, in the pieces from piece0 on; all threads
    // that hold some call it.
    template <int PIECES>
    __device__ void add_dq(const float (&rdQ)[PIECES][4], const RowTile& t, int row,
                           int piece0) const {
        const int head = head_kv * p.group + t.head;
        float* sums = DqPiece<T, HEAD_DIM>::at(
            p.dq_sums, first_row<KV>(p, batch, head) + t.tile * BM + row, piece0);
        sums += thread_index() % 32;
#pragma unroll
        for (int i = 0; i < PIECES * 4; ++i) red_add(sums + i * 32, rdQ[i / 4][i % 4]);
    }
    // With these around it, tiles of keys add in a fixed order, see `KeyPlace::rank`.
    __device__ void take_turn(const RowTile& t) const {
        if (!p.turns) return;
        if (thread_index() == 0)
            while (ld_acquire(turn(t)) != rank(t)) {
            }
        __syncthreads();
    }
    __device__ void end_turn(const RowTile& t) const {
        if (!p.turns) return;
        fence_gpu();
        __syncthreads();
        if (thread_index() == 0) st_release(turn(t), rank(t) + 1);
    }

    __device__ T* rows_of(const Tensor& t) const { return Place::template rows_of<T>(t); }
    __device__ float growth() const { return Of{p}.growth(); }

 private:
    __device__ BackwardBlock(const BackwardArguments<SCORE, KV>& p, unsigned char* smem, int number)
        : Place(p, Place::tile(p, number)), smem(smem_address(smem)), number(number) {}
    __device__ int key_of(int mt, int h, int lane) const {
        return key_tile * BN + key0() + mt * 16 + h * 8 + lane / 4;
    }
    __device__ void differentiate_warp(float (&rdP)[MT][NT][4], const float (&rP)[MT][NT][4],
                                       const Slopes& slopes, const RowTile& t, int stage) const {
        const int lane = thread_index() % 32, head = head_kv * p.group + t.head;
        const Of score{p};
        const float growth = score.growth();
        auto pair = [&](int key, int query) {
            return Pair{
                sequence, batch, head,
                min(t.tile * BM + query / 2 * 8 + lane % 4 * 2 + query % 2, sequence.seq_q - 1),
                min(key_of(key / 2, key % 2, lane), sequence.seq_kv - 1)};
        };
        typename Of::template ArraySums<MT, NT> sums;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const float2 delta = lds_2(rows(stage) + (BM + nt * 8 + lane % 4 * 2) * 4);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                if constexpr (SCORE::DROPS_WEIGHTS) drop(rdP, t, nt, mt, growth);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& x = rdP[mt][nt][i];
                    const float weight = rP[mt][nt][i];
                    x = weight * (x - (i % 2 ? delta.y : delta.x));
                    if constexpr (Of::HAS_SUMS) {
                        const int key = mt * 2 + i / 2, query = nt * 2 + i % 2;
                        x = score.back(weight == 0.f ? 0.f : x, slopes.x[mt][nt][i], p.scale_log2,
                                       pair(key, query), sums, key, query);
                    } else if constexpr (Of::HAS_SLOPE) {
                        x = weight == 0.f ? 0.f : x * slopes.x[mt][nt][i];
                    }
                }
            }
        }
        if constexpr (Of::HAS_SUMS) score.end_sums(sums, pair);
    }
    // x = `factor` times x, or 0 for weights that are dropped.
    __device__ void drop(float (&x)[MT][NT][4], const RowTile& t, int nt, int mt,
                         float factor) const {
        const int lane = thread_index() % 32, head = head_kv * p.group + t.head;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool drops[4] = {};
            Of{p}.dropped(drops, batch, head, t.tile * BM + nt * 8 + lane % 4 * 2 + i,
                          key_of(mt, 0, lane) & ~1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& each = x[mt][nt][2 * h + i];
                each *= factor;
                set_if_equal(each, lane / 4 % 2 ? drops[2 * h + 1] : drops[2 * h], true, 0.f);
            }
        }
    }

    __device__ void load(const RowTile& t, int stage) const {
        if (visits(t)) {
            const int head = head_kv * p.group + t.head, q0 = t.tile * BM;
            const TileLoader<QTile, THREADS, T> load_q{
                head_ptr<T>(p.q, batch, head) + sequence.first_q * p.q.stride_seq, p.q.stride_seq,
                sequence.seq_q, p.head_dim};
            const TileLoader<OTile, THREADS, T> load_do{
                head_ptr<T>(p.d_out, batch, head) + sequence.first_q * p.d_out.stride_seq,
                p.d_out.stride_seq, sequence.seq_q, p.head_dim_v};
            load_q.start(tile_q(stage), q0, load_q.source(q0));
            load_do.start(tile_do(stage), q0, load_do.source(q0));
            const int chunk = thread_index();
            if (chunk < BM / 2) {
                const float* of_rows = chunk < BM / 4 ? p.row_lse : p.row_delta;
                cp_async_16(rows(stage) + chunk * 16,
                            of_rows + first_row<KV>(p, batch, head) + q0 + chunk % (BM / 4) * 4,
                            true);
            }
        }
        cp_async_commit();
    }
};

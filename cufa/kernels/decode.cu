// Flash-decoding (Dao et al. 2023): attention of few queries to many keys, by reading K and V once, at the speed of memory.
// The keys of all sequences are shared out evenly among the blocks, see decode_scheduler.cuh. The query heads that share a KV
// head are the rows of one tile, as the flat product of flash-decoding++ (Hong et al. 2023) has them. The warps of a block take
// tiles of BN keys in turn, each through a ring of its own, filled by cp.async: in the main loop none waits for another. Where
// a unit ends, its warps' O are added up, and where it was cut, the block that comes last merges the pieces. Calls are short:
// what is run once is written for few instructions, as each has to be fetched.
#include "decode_merge.cuh"
#include "decode_scheduler.cuh"
#include "products_fp32.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, class SCORE,
          class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode(const __grid_constant__ DecodeArguments<SCORE, KV> p) {
    constexpr int THREADS = WARPS * 32;
    constexpr int MT = BM / 16, NT = BN / 8, OT = HEAD_DIM_V / 8;  // 16-row, 8-key and 8-column pieces
    using QTile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using KTile = SmemTile<BN, HEAD_DIM, sizeof(T)>;
    using VTile = SmemTile<BN, HEAD_DIM_V, sizeof(T)>;
    // float32 products leave O's columns in another order, and need m in the units of S, see products_fp32.cuh and softmax.cuh.
    constexpr bool FP32 = sizeof(T) == 4;
    using Softmax = OnlineSoftmax<MT, FP32>;
    const float scale = SCORE::LINEAR ? p.scale_log2 : 1.f, m_to_log2 = FP32 ? scale : 1.f;
    constexpr int RING = STAGES * (KTile::bytes + VTile::bytes);
    constexpr int FEW = 4, PITCH = HEAD_DIM_V + 8;  // rows of O that all warps add up at a time
    constexpr int SUM = QTile::bytes + WARPS * RING, STATE = SUM + WARPS * FEW * PITCH * 4;

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem);
    float* sSum = reinterpret_cast<float*>(smem + SUM);  // [WARPS][FEW][PITCH]
    float(*sM)[BM] = reinterpret_cast<float(*)[BM]>(smem + STATE), (*sL)[BM] = sM + WARPS;  // [WARPS][BM] each
    int& sLast = *reinterpret_cast<int*>(smem + STATE + 2 * WARPS * BM * 4);
    const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const uint32_t sK = sQ + QTile::bytes + warp * RING, sV = sK + STAGES * KTile::bytes;
    const int block = blockIdx.x;
    const SCORE& score = p;
    const KV& kv = p;
    const Share<BN> share(p, block, gridDim.x);
    if (share.count <= 0) return;

    // This warp's tile of the share that is asked for next, the unit that it belongs to, and that unit's place and length.
    int asked = warp;
    Unit<BN> of_asked = share.unit;
    int kv_head_asked, keys_asked, page = 0;
    auto look_up = [&] {
        kv_head_asked = of_asked.kv_head(p), keys_asked = sequence_of(p, of_asked.batch).seq_kv;
    };
    // The page of key lane % BN of that tile, looked up ahead of its use.
    auto look_up_page = [&] {
        if (KV::PAGED && asked < share.count)
            page = kv.page(of_asked.batch, min((asked - of_asked.zero) * BN + lane % BN, p.seq_kv - 1));
    };
    auto find_asked = [&] {
        while (asked >= of_asked.end() && asked < share.count) of_asked.next(p);
    };
    find_asked();
    look_up();
    look_up_page();

    // Starts the copy of K and V of a tile, and moves on. What lies beyond the sequence is not read: zeros stand for it.
    auto ask = [&](int slot) {
        const int key = (asked - of_asked.zero) * BN;
        auto load = [&](auto tile, uint32_t dst, const Tensor& t, int cols) {
            using Tile = decltype(tile);
            constexpr int ROWS = 32 / Tile::PANEL;  // at once
            const int row = lane / Tile::PANEL, chunk = lane % Tile::PANEL;
            const T* src = nullptr;
            if constexpr (KV::WHOLE)
                src = kv.template row<T>(t, of_asked.batch, kv_head_asked, key, page) + row * t.stride_seq;
#pragma unroll
            for (int r = 0; r < BN; r += ROWS) {
                if constexpr (!KV::WHOLE)
                    src = kv.template row<T>(t, of_asked.batch, kv_head_asked, key + r + row,
                                             __shfl_sync(0xffffffff, page, r + row));
#pragma unroll
                for (int c = 0; c < Tile::CHUNKS; c += Tile::PANEL)
                    cp_async_16(dst + Tile::offset(r + row, c + chunk), src + (c + chunk) * Tile::CHUNK,
                                key + r + row < keys_asked && (c + chunk) * Tile::CHUNK < cols);
                src += ROWS * t.stride_seq;
            }
        };
        if (asked < share.count) {
            load(KTile(), sK + slot * KTile::bytes, p.k, p.head_dim);
            cp_async_commit();
            load(VTile(), sV + slot * VTile::bytes, p.v, p.head_dim_v);
            cp_async_commit();
            asked += WARPS;
            if (asked >= of_asked.end()) {
                find_asked();
                look_up();
            }
            look_up_page();
        } else {
            cp_async_commit(), cp_async_commit();
        }
    };

    // Q of a unit is fetched before K and V, which would be in its way, into registers, if they are few.
    constexpr int PER_THREAD = (BM * QTile::CHUNKS + THREADS - 1) / THREADS;
    constexpr bool AHEAD = PER_THREAD <= 2;
    float4 q_next[AHEAD ? PER_THREAD : 1];
    auto fetched_q = [&](const UnitRows& at, int i) {
        const int row = (thread + i * THREADS) / QTile::CHUNKS, chunk = (thread + i * THREADS) % QTile::CHUNKS;
        if (row >= at.rows || chunk * QTile::CHUNK >= p.head_dim) return make_float4(0.f, 0.f, 0.f, 0.f);
        return *reinterpret_cast<const float4*>(at.template of<T>(p, p.q, row) + chunk * QTile::CHUNK);
    };
    auto store_q = [&](int i, const float4& values) {
        const int row = (thread + i * THREADS) / QTile::CHUNKS, chunk = (thread + i * THREADS) % QTile::CHUNKS;
        if (row < BM) sts_128(sQ + QTile::offset(row, chunk), values);
    };
    auto fetch_q = [&](const Unit<BN>& unit) {
        if constexpr (!AHEAD) return;
        const UnitRows rows(p, unit, BM);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) q_next[AHEAD ? i : 0] = fetched_q(rows, i);
    };
    fetch_q(share.unit);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) ask(i);

    int slot = 0, at = warp;  // this warp's tile of the share that is computed next
    for (Unit<BN> unit = share.unit;;) {
        const UnitRows tile(p, unit, BM);
        const int rows = tile.rows;
        const Sequence sequence = sequence_of(p, unit.batch);

        __syncthreads();
        if constexpr (AHEAD) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) store_q(i, q_next[i]);
        } else {
#pragma unroll 4
            for (int i = 0; i < PER_THREAD; ++i) store_q(i, fetched_q(tile, i));
        }
        __syncthreads();

        const auto pieces = share.pieces(unit, block);
        const bool whole = pieces.end - pieces.begin == 1;
        const Partial<BM, HEAD_DIM_V> partial{p.partial, pieces.begin};
        // Tiles of keys that all rows see
        const int whole_end = score.sees(sequence, tile.query(p, 0)).end / BN;
        const int whole_first =
            SCORE::LEFT_EDGE ? (max(0, score.sees(sequence, tile.query(p, rows - 1)).first) + BN - 1) / BN : 0;
        Softmax softmax(scale);
        float rO[MT][OT][4] = {};
        for (const int end = min(unit.end(), share.count); at < end; at += WARPS) {
            ask(slot == 0 ? STAGES - 1 : slot - 1);
            const int j = at - unit.zero;
            // S = Q K^T
            cp_async_wait<2 * STAGES - 1>();
            __syncwarp();
            float rS[MT][NT][4] = {};
            const uint32_t tile_k = sK + slot * KTile::bytes, tile_v = sV + slot * VTile::bytes;
            if constexpr (FP32) {
                qk_tensor_cores<QTile, KTile>(rS, sQ, tile_k, 0);
            } else {
                const uint32_t lane_q = lane_offset_a<QTile>(), lane_k = lane_offset_b<KTile>();
#pragma unroll
                for (int kd = 0; kd < HEAD_DIM / 16; ++kd) {
                    uint32_t rQ[MT][4];
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) ldmatrix_x4(rQ[mt], sQ + QTile::advance(lane_q, mt * 16, kd * 2));
#pragma unroll
                    for (int nt = 0; nt < NT; nt += 2) {
                        uint32_t rK[4];
                        ldmatrix_x4(rK, tile_k + KTile::advance(lane_k, nt * 8, kd * 2));
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt) {
                            mma_m16n8k16<T>(rS[mt][nt], rQ[mt], rK[0], rK[1]);
                            mma_m16n8k16<T>(rS[mt][nt + 1], rQ[mt], rK[2], rK[3]);
                        }
                    }
                }
            }

            // P = exp(S - m); m, l and O follow
            const GroupedAt rows_at{lane, tile.first, j * BN, p.group};
            score.apply(rS, sequence, p.scale_log2, rows_at, j >= whole_end || (SCORE::LEFT_EDGE && j < whole_first));
            softmax.update(rS, rO);

            // O += P V
            cp_async_wait<2 * STAGES - 2>();
            __syncwarp();
            if constexpr (FP32) {
                pv_tensor_cores<VTile>(rO, rS, tile_v, 0);
            } else {
                const uint32_t lane_v = lane_offset_a<VTile>();
#pragma unroll
                for (int kk = 0; kk < BN / 16; ++kk) {
                    uint32_t rP[MT][4];
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            rP[mt][i] = pack2<T>(rS[mt][2 * kk + i / 2][i % 2 * 2], rS[mt][2 * kk + i / 2][i % 2 * 2 + 1]);
#pragma unroll
                    for (int ot = 0; ot < OT; ot += 2) {
                        uint32_t rV[4];
                        ldmatrix_x4_trans(rV, tile_v + VTile::advance(lane_v, kk * 16, ot));
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt) {
                            mma_m16n8k16<T>(rO[mt][ot], rP[mt], rV[0], rV[1]);
                            mma_m16n8k16<T>(rO[mt][ot + 1], rP[mt], rV[2], rV[3]);
                        }
                    }
                }
            }
            __syncwarp();  // the slot is filled again in the next round
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }

        const bool last = unit.end() >= share.count;
        if (!last) unit.next(p), fetch_q(unit);

        // O = O / l of two columns, and once a row's log-sum-exp
        auto write = [&](int row, int col, float2 o, float m, float l) {
            if (!FP32) l = Softmax::beyond(m, l);
            const float inverse = 1.f / l;
            T* of_row = tile.template of<T>(p, p.o, row) + col;
            auto divided = [&](float x) { return narrow<T>(l == 0.f ? 0.f : FP32 ? x / l : x * inverse); };
            if (col < p.head_dim_v) of_row[0] = divided(o.x);
            if (col + 1 < p.head_dim_v) of_row[1] = divided(o.y);
            if (p.lse && col == 0)
                p.lse[static_cast<long long>(tile.batch * p.heads_q + tile.head(p, row)) * p.seq_q + tile.query(p, row)] =
                    Softmax::log_sum_exp(m * m_to_log2, l);
        };
        // The warps' m, l and O, FEW rows at a time
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const float l = lanes_sum<4>(softmax.l[i / 2][i % 2]);
            const int row = i * 8 + lane / 4;
            if (lane % 4 == 0) sM[warp][row] = softmax.m[i / 2][i % 2][0], sL[warp][row] = l;
        }
#pragma unroll 1
        for (int begin = 0; begin < rows; begin += FEW) {
            const int some = min(rows - begin, FEW);
#pragma unroll
            for (int i = 0; i < MT * 2; ++i) {
                const int row = i * 8 + lane / 4 - begin;
                if (row < 0 || row >= some) continue;
                float* of_row = sSum + (warp * FEW + row) * PITCH;
#pragma unroll
                for (int ot = 0; ot < OT; ++ot) {
                    const float x = rO[i / 2][ot][i % 2 * 2], y = rO[i / 2][ot][i % 2 * 2 + 1];
                    const int n = lane % 4 * 2;
                    if constexpr (FP32)
                        of_row[ot / 4 * 32 + 4 * n + ot % 4] = x, of_row[ot / 4 * 32 + 4 * n + 4 + ot % 4] = y;
                    else
                        *reinterpret_cast<float2*>(of_row + ot * 8 + n) = make_float2(x, y);
                }
            }
            __syncthreads();
            for_each_pair<WARPS, HEAD_DIM_V>(some, [&](int of_some, int col) {
                const int row = begin + of_some;
                float m = Softmax::NONE, l = 0.f;
                float2 o = make_float2(0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) m = fmaxf(m, sM[w][row]);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float weight = exp2_approx((sM[w][row] - m) * m_to_log2);
                    const float2 of_warp = *reinterpret_cast<const float2*>(sSum + (w * FEW + of_some) * PITCH + col);
                    l = fmaf(sL[w][row], weight, l);
                    o.x = fmaf(of_warp.x, weight, o.x), o.y = fmaf(of_warp.y, weight, o.y);
                }
                if (whole) return write(row, col, o, m, l);
                float* of_piece = partial.of(block);
                *reinterpret_cast<float2*>(of_piece + row * HEAD_DIM_V + col) = o;
                if (col == 0) *reinterpret_cast<float2*>(of_piece + partial.M_AND_L + 2 * row) = make_float2(m, l);
            });
            __syncthreads();
        }

        // Whoever comes last merges the pieces.
        if (!whole) {
            if (thread == 0) {
                __threadfence();
                sLast = atomicAdd(p.arrived + pieces.begin, 1) == pieces.end - pieces.begin - 1;
                if (sLast) p.arrived[pieces.begin] = 0;
                __threadfence();
            }
            __syncthreads();
            if (sLast)
                merge_pieces<WARPS, BM == 16 && OT <= 16 && !FP32 ? 24 : 8>(partial, pieces.end, rows, m_to_log2, sSum + warp * 32, write);
        }
        if (last) break;
    }
    cp_async_wait<0>();
}

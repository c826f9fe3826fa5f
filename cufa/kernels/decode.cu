// Flash-decoding (Dao et al. 2023): attention of few queries to many keys, by reading K and V once, at the speed of memory.
// The keys of all sequences are shared out evenly among the blocks, see decode_scheduler.cuh. The query heads that share a KV
// head are the rows of one tile, as the flat product of flash-decoding++ (Hong et al. 2023) has them. The warps of a block take
// tiles of BN keys in turn, each through a ring of its own, filled by cp.async: in the main loop none waits for another. Where
// a unit ends, its warps' O are merged, and where it was cut, the block that comes last merges the pieces.
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
    // O of all warps is added up a few columns at a time.
    constexpr int COLS = HEAD_DIM_V % (64 / MT) == 0 ? 64 / MT : FP32 ? 32 : 16, PITCH = COLS + 2;
    using Softmax = OnlineSoftmax<MT, FP32>;
    const float scale = SCORE::LINEAR ? p.scale_log2 : 1.f, m_to_log2 = FP32 ? scale : 1.f;
    constexpr int RING = STAGES * (KTile::bytes + VTile::bytes);
    constexpr int SUM = QTile::bytes + WARPS * RING, STATE = SUM + WARPS * BM * PITCH * 4;

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem);
    float* sSum = reinterpret_cast<float*>(smem + SUM);                            // [WARPS][BM][PITCH]
    float(*sM)[BM] = reinterpret_cast<float(*)[BM]>(smem + STATE), (*sL)[BM] = sM + WARPS;  // [WARPS][BM] each
    int& sLast = *reinterpret_cast<int*>(smem + STATE + 2 * WARPS * BM * 4);
    const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const uint32_t sK = sQ + QTile::bytes + warp * RING, sV = sK + STAGES * KTile::bytes;
    const int block = blockIdx.x, blocks = gridDim.x;
    const SCORE& score = p;
    const KV& kv = p;
    const Units<BN> units{p};
    const Share<BN> share(units, block, blocks);

    // This warp's tiles, one ahead of the other: that which is asked for, and that which is computed.
    struct Cursor {
        int unit, j, left, tiles;
        __device__ bool step(const Units<BN>& units, int n) {
            j += n, left -= n;
            return settle(units);
        }
        __device__ bool settle(const Units<BN>& units) {  // whether it is another unit
            if (left <= 0 || j < tiles) return false;
            do {
                j -= tiles;
                tiles = units.tiles(++unit);
            } while (j >= tiles);
            return true;
        }
    };
    Cursor asked{share.unit, share.j + warp, share.left - warp, share.left > 0 ? units.tiles(share.unit) : 1};
    asked.settle(units);
    Cursor at = asked;
    // Where the unit is that is asked for, and its keys.
    int batch_asked, kv_head_asked, keys_asked;
    auto look_up = [&] {
        batch_asked = units.batch(asked.unit), kv_head_asked = asked.unit / p.row_tiles % p.heads_kv;
        keys_asked = sequence_of(p, batch_asked).seq_kv;
    };
    if (asked.left > 0) look_up();
    // The page of key lane % BN of the tile that is asked for next, looked up ahead of its use.
    auto page_of = [&](const Cursor& c) {
        return KV::PAGED && c.left > 0 ? kv.page(batch_asked, min(c.j * BN + lane % BN, p.seq_kv - 1)) : 0;
    };
    int page = page_of(asked);

    // Starts the copy of K and V of a tile, and moves on. What lies beyond the sequence is not read: zeros stand for it.
    auto ask = [&](int slot) {
        auto load = [&](auto tile, uint32_t dst, const Tensor& t, int cols, int batch, int kv_head, int keys) {
            using Tile = decltype(tile);
            constexpr int ROWS = 32 / Tile::PANEL;  // at once
#pragma unroll
            for (int r = 0; r < BN; r += ROWS) {
                const int row = r + lane / Tile::PANEL;
                const int of_row = KV::PAGED ? __shfl_sync(0xffffffff, page, row) : 0;
                const T* src = kv.template row<T>(t, batch, kv_head, asked.j * BN + row, of_row);
#pragma unroll
                for (int c = 0; c < Tile::CHUNKS; c += Tile::PANEL) {
                    const int chunk = c + lane % Tile::PANEL;
                    cp_async_16(dst + Tile::offset(row, chunk), src + chunk * Tile::CHUNK,
                                row < keys && chunk * Tile::CHUNK < cols);
                }
            }
            cp_async_commit();
        };
        if (asked.left > 0) {
            const int keys = keys_asked - asked.j * BN;
            load(KTile(), sK + slot * KTile::bytes, p.k, p.head_dim, batch_asked, kv_head_asked, keys);
            load(VTile(), sV + slot * VTile::bytes, p.v, p.head_dim_v, batch_asked, kv_head_asked, keys);
            if (asked.step(units, WARPS)) look_up();
            page = page_of(asked);
        } else {
            cp_async_commit(), cp_async_commit();
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) ask(i);

    int slot = 0;
    int begin = share.begin - share.j;  // of the unit at hand, in the list of tiles
    for (int unit = share.unit, j_first = share.j, left = share.left; left > 0; ++unit) {
        const int batch = units.batch(unit), kv_head = unit / p.row_tiles % p.heads_kv, row0 = unit % p.row_tiles * BM;
        const int tiles = units.tiles(unit), rows = min(p.group * p.seq_q - row0, BM);
        const Sequence sequence = sequence_of(p, batch);

        // Q: the rows are those of the heads that share the KV head, query by query
        __syncthreads();
        for (int i = thread; i < BM * QTile::CHUNKS; i += THREADS) {
            const int row = row0 + i / QTile::CHUNKS, chunk = i % QTile::CHUNKS;
            const int query = row / p.group, head = kv_head * p.group + row % p.group;
            float4 values = make_float4(0.f, 0.f, 0.f, 0.f);
            if (query < p.seq_q && chunk * QTile::CHUNK < p.head_dim)
                values = *reinterpret_cast<const float4*>(head_ptr<T>(p.q, batch, head) + query * p.q.stride_seq +
                                                          chunk * QTile::CHUNK);
            sts_128(sQ + QTile::offset(i / QTile::CHUNKS, chunk), values);
        }
        __syncthreads();

        Softmax softmax(scale);
        float rO[MT][OT][4] = {};
        while (at.left > 0 && at.unit == unit) {
            ask(slot == 0 ? STAGES - 1 : slot - 1);
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
            const GroupedAt rows_at{lane, row0, at.j * BN, p.group};
            const bool masked = (at.j + 1) * BN > score.sees(sequence, row0 / p.group).end ||
                                (SCORE::LEFT_EDGE && at.j * BN < score.sees(sequence, (row0 + BM - 1) / p.group).first);
            score.apply(rS, sequence, p.scale_log2, rows_at, masked);
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
            at.step(units, WARPS);
        }

        // The warps' parts of the unit: m and l
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float l = lanes_sum<4>(softmax.l[mt][h]);
                const int row = mt * 16 + h * 8 + lane / 4;
                if (lane % 4 == 0) sM[warp][row] = softmax.m[mt][h][0], sL[warp][row] = l;
            }
        __syncthreads();
        float factor[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = mt * 16 + h * 8 + lane / 4;
                float m = sM[0][row];
                for (int w = 1; w < WARPS; ++w) m = fmaxf(m, sM[w][row]);
                factor[mt][h] = exp2_approx((softmax.m[mt][h][0] - m) * m_to_log2);
            }
        auto beyond = [](float m, float l) { return FP32 ? l : Softmax::beyond(m, l); };
        // Of a row: the sum of all, and m
        auto state = [&](int row, float& m, float& l) {
            m = sM[0][row], l = 0.f;
            for (int w = 1; w < WARPS; ++w) m = fmaxf(m, sM[w][row]);
            for (int w = 0; w < WARPS; ++w) l += sL[w][row] * exp2_approx((sM[w][row] - m) * m_to_log2);
        };

        // Where the unit was cut, the pieces of it are with other blocks, too.
        const int j_end = min(tiles, j_first + left);
        int first_block = block, last_block = block;
        if (p.splits) {
            first_block = block - block % p.splits;
            last_block = first_block + (tiles + (tiles + p.splits - 1) / p.splits - 1) / ((tiles + p.splits - 1) / p.splits) - 1;
        } else if (j_first > 0 || j_end < tiles) {
            first_block = share.block_of(begin), last_block = share.block_of(begin + tiles - 1);
        }
        const bool whole = first_block == last_block;
        // A piece with the unit's beginning is the block's last, and others are its first.
        auto partial = [&](int b) {
            return p.partial + static_cast<long long>(2 * b + (b == first_block)) * BM * (p.head_dim_v + 2);
        };
        auto write = [&](int row, int col, float value) {
            const int query = (row0 + row) / p.group, head = kv_head * p.group + (row0 + row) % p.group;
            head_ptr<T>(p.o, batch, head)[query * p.o.stride_seq + col] = narrow<T>(value);
        };
        auto write_lse = [&](int row, float m, float l) {
            const int query = (row0 + row) / p.group, head = kv_head * p.group + (row0 + row) % p.group;
            if (p.lse)
                p.lse[static_cast<long long>(batch * p.heads_q + head) * p.seq_q + query] =
                    Softmax::log_sum_exp(m * m_to_log2, l);
        };

        // O, a few columns at a time
#pragma unroll
        for (int c = 0; c < HEAD_DIM_V; c += COLS) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int i = 0; i < COLS / 8 * 4; ++i) {
                    const int row = mt * 16 + i % 4 / 2 * 8 + lane / 4, n = lane % 4 * 2 + i % 2;
                    const int col = FP32 ? i / 16 * 32 + 4 * n + i / 4 % 4 : i / 4 * 8 + n;
                    sSum[(warp * BM + row) * PITCH + col] = rO[mt][c / 8 + i / 4][i % 4] * factor[mt][i % 4 / 2];
                }
            __syncthreads();
            for (int i = thread; i < rows * COLS; i += THREADS) {
                const int row = i / COLS, col = i % COLS;
                if (c + col >= p.head_dim_v) continue;
                float o = 0.f, m, l;
                for (int w = 0; w < WARPS; ++w) o += sSum[(w * BM + row) * PITCH + col];
                if (whole) {
                    state(row, m, l);
                    write(row, c + col, l == 0.f ? 0.f : o / beyond(m, l));
                } else {
                    partial(block)[row * p.head_dim_v + c + col] = o;
                }
            }
            __syncthreads();
        }
        for (int row = thread; row < rows; row += THREADS) {
            float m, l;
            state(row, m, l);
            if (whole) {
                write_lse(row, m, beyond(m, l));
            } else {
                float* of_row = partial(block) + BM * p.head_dim_v + 2 * row;
                of_row[0] = m, of_row[1] = l;
            }
        }

        // Whoever comes last merges the pieces, the first first.
        if (!whole) {
            __threadfence();
            __syncthreads();
            if (thread == 0) {
                sLast = atomicAdd(p.arrived + first_block, 1) == last_block - first_block;
                if (sLast) p.arrived[first_block] = 0;
            }
            __syncthreads();
            if (sLast) {
                __threadfence();
                for (int i = thread; i < rows * p.head_dim_v; i += THREADS) {
                    const int row = i / p.head_dim_v, col = i % p.head_dim_v;
                    float m = Softmax::NONE, l = 0.f, o = 0.f;
                    auto state_of = [&](int b) {
                        return __ldcg(reinterpret_cast<const float2*>(partial(b) + BM * p.head_dim_v) + row);
                    };
                    for (int b = first_block; b <= last_block; ++b) m = fmaxf(m, state_of(b).x);
#pragma unroll 4
                    for (int b = first_block; b <= last_block; ++b) {
                        const float2 piece = state_of(b);
                        const float alpha = exp2_approx((piece.x - m) * m_to_log2);
                        l += piece.y * alpha, o += __ldcg(partial(b) + i) * alpha;
                    }
                    write(row, col, l == 0.f ? 0.f : o / beyond(m, l));
                    if (col == 0) write_lse(row, m, beyond(m, l));
                }
            }
        }

        begin += tiles;
        left -= j_end - j_first;
        j_first = 0;
    }
    cp_async_wait<0>();
}

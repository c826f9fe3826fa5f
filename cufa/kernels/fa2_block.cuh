// The part that fa2_mma.cu and fa2_fp32.cu share: which rows and keys a block works on, and the
// ring through which K and V arrive.
#pragma once
#include "epilogue.cuh"
#include "kv.cuh"
#include "params.cuh"
#include "scheduler.cuh"
#include "score.cuh"
#include "tile.cuh"

// Copies the tiles of BN keys that are visited: a map may leave out others.
template <class Loader, int BN, bool BLOCKS>
struct OfVisits {
    using type = Loader;
};
template <class Loader, int BN>
struct OfVisits<Loader, BN, true> {
    struct type : Loader {
        Visits<true> visits;

        __device__ auto source(int row) const { return Loader::source(key(row)); }
        template <class T>
        __device__ void start(uint32_t tile, int row, const T* src) const {
            Loader::start(tile, key(row), src);
        }

     private:
        __device__ int key(int row) const { return visits.tile(row / BN) * BN; }
    };
};

// A block computes BM rows of one head's output, shared by ROW_WARPS of its warps. Q stays in
// shared memory; K and V pass through a ring of STAGES by cp.async, the last keys first.
template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int ROW_WARPS, class SCORE, class KV>
struct Fa2Block {
    static constexpr int THREADS = WARPS * 32;
    static constexpr int MT = BM / ROW_WARPS / 16;  // 16-row pieces of a warp
    static constexpr bool UNEVEN =
        SCORE::LEFT_EDGE || SCORE::RIGHT_EDGE;  // rows see different keys
    using QTile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using KTile = SmemTile<BN, HEAD_DIM, sizeof(T)>;
    using VTile = SmemTile<BN, HEAD_DIM_V, sizeof(T)>;

    const Arguments<SCORE, KV>& p;
    uint32_t sQ, sK, sV;
    typename OfVisits<TileLoader<KTile, THREADS, T>, BN, SCORE::HAS_BLOCK_MAP>::type load_k;
    typename OfVisits<TileLoader<VTile, THREADS, T>, BN, SCORE::HAS_BLOCK_MAP>::type load_v;
    unsigned char* smem;
    int first, end, whole_end;  // what the block visits, and where keys end that all rows see, if
                                // these see the same
    bool is_empty;              // whether it has no rows

    __device__ Fa2Block(const Arguments<SCORE, KV>& p, unsigned char* smem) : p(p), smem(smem) {
        const Tile tile = found_tile();
        const int q0 = tile.q_tile * BM, kv_head = tile.head / p.group;
        const Sequence sequence = KV::sequence(p, tile.batch, q0);
        is_empty = KV::RAGGED && q0 >= sequence.seq_q;
        if (KV::RAGGED && threadIdx.x == 0) {
            volatile Tile& own = *sTile();
            own.batch = tile.batch, own.head = tile.head, own.q_tile = tile.q_tile;
        }
        sQ = smem_address(smem), sK = sQ + QTile::bytes, sV = sK + STAGES * KTile::bytes;
        load_k = {
            KV::template rows<T>(p.k, tile.batch, kv_head) + sequence.first_k * p.k.stride_seq,
            p.k.stride_seq, sequence.seq_kv, p.head_dim};
        load_v = {
            KV::template rows<T>(p.v, tile.batch, kv_head) + sequence.first_k * p.v.stride_seq,
            p.v.stride_seq, sequence.seq_kv, p.head_dim_v};

        const KeyTiles keys = key_tiles(sequence, q0, BM);
        first = SCORE::LEFT_EDGE ? keys.first : 0, end = keys.end, whole_end = keys.whole_end;
        if constexpr (SCORE::HAS_BLOCK_MAP) {
            const SCORE& score = p;
            const BlockLine line =
                score.template block_line<BN>(p.seq_kv, tile.batch, tile.head, tile.q_tile);
            line.count(first, end);
            load_k.visits = load_v.visits = line.visits();
        }
        if (!UNEVEN && !KV::RAGGED) return;
        if (KV::RAGGED) __syncthreads();
        if (UNEVEN && threadIdx.x % 32 < MT) {
            const KeyTiles piece = key_tiles(sequence, row0() + threadIdx.x % 32 * 16, 16);
            volatile KeyTiles& own = sKeys()[threadIdx.x % 32];
            own.first = piece.first, own.end = piece.end;
            own.whole_first = piece.whole_first, own.whole_end = piece.whole_end;
        }
        __syncthreads();
    }
    // Starts the first copies.
    __device__ void start() const {
        const Tile tile = this->tile();
        const int q0 = tile.q_tile * BM;
        const Sequence sequence = KV::sequence(p, tile.batch, q0);
        const T* rows = head_ptr<T>(p.q, tile.batch, tile.head) + sequence.first_q * p.q.stride_seq;
        const TileLoader<QTile, THREADS, T> load_q{rows, p.q.stride_seq, sequence.seq_q,
                                                   p.head_dim};
        load_q.start(sQ, q0, load_q.source(q0));
        start_k(end - 1);
        if constexpr (STAGES > 1) start_v(end - 1);
        for (int j = end - 2; j > end - STAGES; --j) start_k(j), start_v(j);
    }

    // The block's tile and the warp's first row: computed again at each use, as registers are
    // scarce, or read from shared memory where sequences follow each other.
    __device__ Tile tile() const {
        if constexpr (KV::RAGGED) return {sTile()->batch, sTile()->head, sTile()->q_tile};
        return found_tile();
    }
    __device__ int row0() const { return tile().q_tile * BM + warp_row<BM, ROW_WARPS>(); }

    __device__ OutputTile<BM, ROW_WARPS> output(const Tile& tile) const {
        if constexpr (KV::RAGGED) return {tile, KV::sequence(p, tile.batch, 0), 0};
        return {tile, Dense::sequence(p, tile.batch, 0), tile.batch};
    }

    static constexpr int RING_BYTES = QTile::bytes + STAGES * (KTile::bytes + VTile::bytes);
    __device__ volatile KeyTiles* sKeys() const {
        return reinterpret_cast<KeyTiles*>(smem + RING_BYTES) + thread_index() / 32 * MT;
    }
    __device__ volatile Tile* sTile() const {  // found once, where that takes a search
        return reinterpret_cast<Tile*>(smem + RING_BYTES + WARPS * MT * sizeof(KeyTiles));
    }

    // Waits for K of tile j. Every warp is then done with the tile before, whose place is filled
    // again.
    __device__ void next_k(int j) const {
        if constexpr (STAGES == 1) {
            const T* source =
                load_v.source(j * BN);  // before the wait, so that the copy starts right after it
            cp_async_wait<0>();
            __syncthreads();
            load_v.start(sV, j * BN, source);
            cp_async_commit();
        } else {
            cp_async_wait<2 * (STAGES - 2)>();
            __syncthreads();
            start_k(j - STAGES + 1);
            start_v(j - STAGES + 1);
        }
    }
    // Waits for V of tile j. With one stage, the next K then takes the place of K.
    __device__ void next_v(int j) const {
        if constexpr (STAGES == 1) {
            const T* source = load_k.source((j - 1) * BN);
            cp_async_wait<0>();
            __syncthreads();
            if (j > first) load_k.start(sK, (j - 1) * BN, source);
            cp_async_commit();
        }
    }
    __device__ uint32_t tile_k(int j) const { return sK + j % STAGES * KTile::bytes; }
    __device__ uint32_t tile_v(int j) const { return sV + j % STAGES * VTile::bytes; }

    // Tells of a tile of keys, a bit for each 16-row piece of the warp: whether the piece visits
    // it; whether O begins with it, or has ended before it; and whether some rows may not see all
    // of its keys. The warp skips tiles that no piece visits, so that nothing of their V reaches
    // these rows.
    struct Edge {
        uint32_t visits = ~0u, begins = 0, ended = 0;
        bool masked = false;
    };
    __device__ Edge edge(int j) const {
        Edge edge;
        if constexpr (SCORE::HAS_BLOCK_MAP) {
            const int tile = visits().tile(j),
                      before = j == end - 1 ? 0x7fffffff : visits().tile(j + 1);
            edge.masked = tile >= whole_end;
            if constexpr (UNEVEN) {
                const volatile KeyTiles& own = sKeys()[thread_index() % 32 % MT];
                const int own_end = own.end;
                edge.visits = __ballot_sync(
                    0xffffffff, tile < own_end && (!SCORE::LEFT_EDGE || tile >= own.first));
                edge.begins = __ballot_sync(0xffffffff, tile < own_end && before >= own_end);
                if constexpr (SCORE::LEFT_EDGE)
                    edge.ended = __ballot_sync(0xffffffff, tile < own.first);
                edge.masked =
                    __any_sync(0xffffffff, tile >= own.whole_end ||
                                               (SCORE::LEFT_EDGE && tile < own.whole_first));
            }
        } else if constexpr (!UNEVEN) {
            edge.masked = j >= whole_end;
        } else {
            const volatile KeyTiles *first = sKeys(), *last = first + MT - 1;
            // A vote tells the compiler what is the same in all lanes.
            if (!__any_sync(0xffffffff, j >= first->whole_end - 1 ||
                                            (SCORE::LEFT_EDGE && j < last->whole_first)))
                return edge;
            const volatile KeyTiles& own =
                first[thread_index() % 32 % MT];  // each lane asks for a piece
            const int end = own.end;
            edge.visits =
                __ballot_sync(0xffffffff, j < end && (!SCORE::LEFT_EDGE || j >= own.first));
            edge.begins = __ballot_sync(0xffffffff, j == end - 1);
            if constexpr (SCORE::LEFT_EDGE) edge.ended = __ballot_sync(0xffffffff, j < own.first);
            edge.masked = __any_sync(
                0xffffffff, j >= own.whole_end || (SCORE::LEFT_EDGE && j < own.whole_first));
        }
        return edge;
    }
    // Applies score and mask to S of the tile, in place.
    template <int NT>
    __device__ void apply_score(float (&rS)[MT][NT][4], int j, bool masked) const {
        if (!SCORE::CHANGES_EVERY_TILE && !masked) return;
        const Tile tile = this->tile();
        const At at{reread_thread_index() % 32, row0(), visits().tile(j) * BN, tile.batch,
                    tile.head};
        const Sequence sequence = KV::sequence(p, tile.batch, tile.q_tile * BM);
        static_cast<const SCORE&>(p).apply(rS, sequence, p.scale_log2, at, {masked, masked},
                                           visits().visit(j).is_partial());
    }
    // Applies the dropout to P of the tile.
    template <int NT>
    __device__ void drop(float (&rP)[MT][NT][4], int j) const {
        if constexpr (SCORE::DROPS_WEIGHTS) {
            const Tile tile = this->tile();
            p.drop(rP, At{reread_thread_index() % 32, row0(), visits().tile(j) * BN, tile.batch,
                          tile.head});
        }
    }
    // O = O / l, and the log-sum-exp where it is asked for.
    template <class Softmax, int OT>
    __device__ void finish(Softmax& softmax, float (&rO)[MT][OT][4], float (&lse)[MT][2]) const {
        float divisor[MT][2];
        softmax.conclude(divisor, lse, SCORE::NEEDS_LSE || p.lse);
        if constexpr (SCORE::ENDS_ROWS) {
            const int head = tile().head;
#pragma unroll
            for (int i = 0; i < MT * 2; ++i)
                p.end_row(divisor[i / 2][i % 2], lse[i / 2][i % 2], head);
        }
        softmax.divide(rO, divisor);
        if constexpr (KV::PADS_ROWS) clear_padding(rO, lse);
    }

 private:
    // Rows that follow the sequence's last query.
    template <int OT>
    __device__ void clear_padding(float (&rO)[MT][OT][4], float (&lse)[MT][2]) const {
        const int end = KV::queries(p, tile().batch) - row0() - reread_thread_index() % 32 / 4;
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            if (i / 2 * 16 + i % 2 * 8 < end) continue;
            lse[i / 2][i % 2] = -INF;
#pragma unroll
            for (int ot = 0; ot < OT; ++ot)
                rO[i / 2][ot][i % 2 * 2] = rO[i / 2][ot][i % 2 * 2 + 1] = 0.f;
        }
    }
    __device__ Tile found_tile() const {
        if constexpr (KV::RAGGED) return KV::template tile<BM>(p, block_index(), 0);
        return row_tile<UNEVEN>(p, block_index());
    }
    __device__ KeyTiles key_tiles(const Sequence& sequence, int row, int rows) const {
        KeyTiles keys =
            static_cast<const SCORE&>(p).template key_tiles<BN>(sequence, row, row + rows - 1);
        if (SCORE::CHANGES_EVERY_TILE && sequence.seq_kv == 0)
            keys.end = 0;  // there is nothing that a part could read
        return keys;
    }
    __device__ Visits<SCORE::HAS_BLOCK_MAP> visits() const {
        if constexpr (SCORE::HAS_BLOCK_MAP) return load_k.visits;
        return {};
    }
    __device__ void start_k(int j) const {
        if (j >= first) load_k.start(tile_k(j), j * BN, load_k.source(j * BN));
        cp_async_commit();
    }
    __device__ void start_v(int j) const {
        if (j >= first) load_v.start(tile_v(j), j * BN, load_v.source(j * BN));
        cp_async_commit();
    }
};

template <int OT>
__device__ void clear(float (&rO)[OT][4]) {
#pragma unroll
    for (int i = 0; i < OT * 4; ++i) rO[i / 4][i % 4] = opaque_zero();
}

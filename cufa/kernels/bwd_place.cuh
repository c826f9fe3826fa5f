// Which keys a block of the backward pass works on, and which tiles of rows visit them.
#pragma once
#include "bwd_params.cuh"
#include "ptx.cuh"
#include "ptx_reduce.cuh"
#include "score.cuh"

// A tile of rows of one query head of the group.
struct RowTile {
    int head;  // of the group
    int tile;
};

// The block's number: where blocks wait for others, these have begun before it. The first word of
// shared memory is free until then.
template <class Arguments>
__device__ int number_of_block(const Arguments& p, unsigned char* smem) {
    if (!p.turns) return block_index();
    if (thread_index() == 0) *reinterpret_cast<volatile int*>(smem) = draw(p.turns_drawn);
    __syncthreads();
    const int number = *reinterpret_cast<volatile int*>(smem);
    __syncthreads();
    return __shfl_sync(0xffffffff, number, 0);
}

// A tile of BN keys of one head of K and V, and the tiles of BM rows that visit it. SPLITS: whether
// several blocks may share the query heads of its group.
template <int BM, int BN, class SCORE, class KV, bool SPLITS = false>
struct KeyPlace {
    const BackwardArguments<SCORE, KV>& p;
    int batch, head_kv, key_tile;
    Sequence sequence;
    int first, end;            // tiles of rows
    int first_head, end_head;  // of the group

    // `split`: which of these blocks it is.
    __device__ KeyPlace(const BackwardArguments<SCORE, KV>& p, const Tile& tile, int split = 0)
        : p(p), batch(tile.batch), head_kv(tile.head), key_tile(tile.q_tile) {
        first_head = SPLITS ? split * p.split_heads : 0;
        end_head = SPLITS ? min(p.group, first_head + p.split_heads) : p.group;
        sequence = KV::sequence(p, batch, 0);
        const int tiles = key_tile * BN < sequence.seq_kv ? (sequence.seq_q + BM - 1) / BM : 0;
        first = SCORE::RIGHT_EDGE
                    ? first_of(tiles, [&](int i) { return keys_of(i).end > key_tile; })
                    : 0;
        end = SCORE::LEFT_EDGE ? first_of(tiles, [&](int i) { return keys_of(i).first > key_tile; })
                               : tiles;
    }

    // The tile of a number, in the order of scheduler.cuh: the first keys of a head are its first
    // tile, since under a causal mask most rows visit them. With turns the last keys come first, as
    // they add to dQ: see `rank`.
    static __device__ Tile tile(const BackwardArguments<SCORE, KV>& p, int number) {
        const int of_batch = p.heads_q / p.group;
        const auto [head, rank] =
            tile_in_order(number, p.heads / p.group, p.kv_tiles, p.section_heads, 0);
        const int of_head = p.turns ? p.kv_tiles - 1 - rank : rank;
        if constexpr (KV::RAGGED)
            return KV::template tile_of_head<BN>(p.cu_seqlens_k, p.seq_kv, p.sequences, head,
                                                 of_head);
        return {head / of_batch, head % of_batch, of_head};
    }

    // The tiles of rows to visit, one after the other, until `head` is the last one's end.
    __device__ RowTile begin() const { return found({first < end ? first_head : end_head, first}); }
    __device__ RowTile after(const RowTile& t) const { return found({t.head, t.tile + 1}); }
    __device__ bool visits(const RowTile& t) const { return t.head < end_head; }
    __device__ int query_head(const RowTile& t) const { return head_kv * p.group + t.head; }
    // Where they begin in the workspace.
    __device__ long long row_of(const RowTile& t) const {
        return first_row<KV>(p, batch, query_head(t)) + t.tile * BM;
    }
    // Which tiles of keys a tile of rows visits.
    __device__ KeyTiles keys_of(int tile) const {
        return static_cast<const SCORE&>(p).template key_tiles<BN>(sequence, tile * BM,
                                                                   tile * BM + BM - 1);
    }
    // Whether PAIRWISE parts may hide some keys of this tile from some of them.
    __device__ bool is_partial(const RowTile& t) const {
        if constexpr (SCORE::HAS_BLOCK_MAP) {
            const int* line = this->line(t);
            const BlockLine of_tile{line, (p.seq_kv + BN - 1) / BN};
            return of_tile.visits().visit(line[key_tile]).is_partial();
        }
        return true;
    }

    // How many tiles of keys add to the rows before this one does; and where these are counted. The
    // last keys add first: under a causal mask a block begins at the diagonal, so that blocks which
    // begin together do not wait for each other. No block waits forever: it waits only for blocks
    // with lower numbers, which have begun, and the lowest of those that run waits for none.
    __device__ int rank(const RowTile& t) const {
        const int end = keys_of(t.tile).end;
        if constexpr (SCORE::HAS_BLOCK_MAP) return line(t)[end] - line(t)[key_tile + 1];
        return end - 1 - key_tile;
    }
    __device__ int* turn(const RowTile& t) const { return p.turns + row_of(t) / TURN_ROWS; }

    // How many keys there are from the tile's first one on, those included that have no gradient.
    __device__ int keys_left() const {
        return (KV::RAGGED ? sequence.seq_kv : p.seq_kv) - key_tile * BN;
    }
    // Where the tile's rows are in a gradient.
    template <class T>
    __device__ T* rows_of(const Tensor& t) const {
        return head_ptr<T>(t, KV::RAGGED ? 0 : batch, head_kv) +
               (sequence.first_k + key_tile * BN) * t.stride_seq;
    }

 private:
    // The first of `tiles` tiles of rows for which something holds, as for all behind it; `tiles`
    // if there is none.
    template <class Holds>
    static __device__ int first_of(int tiles, const Holds& holds) {
        int low = 0, high = tiles;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (holds(middle))
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
    __device__ RowTile found(RowTile t) const {
        for (;; ++t.tile) {
            if (t.tile >= end) ++t.head, t.tile = first;
            if (t.head >= end_head) return t;
            if constexpr (!SCORE::HAS_BLOCK_MAP) return t;
            const int* line = this->line(t);
            if (line[key_tile + 1] > line[key_tile]) return t;
        }
    }
    // The line of a map for a tile of rows, see BlockLine.
    __device__ const int* line(const RowTile& t) const {
        if constexpr (SCORE::HAS_BLOCK_MAP) {
            const SCORE& score = p;
            return score.template block_line<BN>(p.seq_kv, batch, query_head(t), t.tile).line;
        }
        return nullptr;
    }
};

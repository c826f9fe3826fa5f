// How a kernel finds Q, K, V and O, and how long the sequences are.
#pragma once
#include "params.cuh"
#include "scheduler.cuh"
#include "score.cuh"

// In (batch, heads, seq, dim) tensors, all sequences of the same lengths.
struct Dense {
    // Whether sequences follow each other in one array.
    static constexpr bool RAGGED = false;
    // Whether memory after a sequence's last key may hold anything.
    static constexpr bool TAILS = false;
    // Whether rows of the result may follow a sequence's last query.
    static constexpr bool PADS_ROWS = false;

    // The sequence, as a tile of rows finds it that begins with query q0.
    static __device__ Sequence sequence(const Params& p, int batch, int q0) {
        return {p.seq_q, p.seq_kv};
    }

    // The rows of one head.
    template <class T>
    static __device__ const T* rows(const Tensor& t, int batch, int head) {
        return head_ptr<T>(t, batch, head);
    }

    // The same as coordinates of a tensor map: an axis along which all is the same (stride 0) has
    // length 1 there.
    static __device__ int map_head(const Tensor& t, int head) { return t.stride_head ? head : 0; }
    static __device__ int map_batch(const Tensor& t, int batch) {
        return t.stride_batch ? batch : 0;
    }
};

// The same, but only the first queries and keys of each sequence exist. Rows of the result that
// follow them are 0, and -inf in the log-sum-exp.
struct Padded : Dense {
    static constexpr bool TAILS = true, PADS_ROWS = true;
    const int *lengths_k, *lengths_q;  // (batch,); null for all

    template <class Arguments>
    static __device__ int queries(const Arguments& p, int batch) {
        return p.lengths_q ? min(max(p.lengths_q[batch], 0), p.seq_q) : p.seq_q;
    }
    // A tile behind the last query has rows that see no key.
    template <class Arguments>
    static __device__ Sequence sequence(const Arguments& p, int batch, int q0) {
        const int seq_q = queries(p, batch);
        if (q0 >= seq_q) return {p.seq_q, 0};
        return {seq_q, p.lengths_k ? min(max(p.lengths_k[batch], 0), p.seq_kv) : p.seq_kv};
    }
};

// Sequences of any lengths, one after the other in (1, heads, total, dim) tensors whose stride
// along the batch is 0. Params say the totals. Nothing outside of the arrays is read or written,
// whatever the offsets are.
struct Varlen : Dense {
    static constexpr bool RAGGED = true, TAILS = true;
    const int *cu_seqlens_q, *cu_seqlens_k;  // (sequences + 1,): where each begins
    const int* seqused_k;  // (sequences,): how many of its keys are in use; null for all
    int sequences, max_seqlen_q, max_seqlen_k;

    template <class Arguments>
    static __device__ Sequence sequence(const Arguments& p, int batch, int q0) {
        const Keys q = span(p.cu_seqlens_q, batch, p.seq_q),
                   k = span(p.cu_seqlens_k, batch, p.seq_kv);
        int seq_kv = min(k.end - k.first, p.max_seqlen_k);
        if (p.seqused_k) seq_kv = min(seq_kv, max(p.seqused_k[batch], 0));
        return {min(q.end - q.first, p.max_seqlen_q), seq_kv, q.first, k.first};
    }

    // The i-th tile of BM rows, in the order of scheduler.cuh: the last sequence's last rows first.
    template <int BM, class Arguments>
    static __device__ Tile tile(const Arguments& p, int i, int pack_log2) {
        const Ranked found = tile_in_order(i, p.heads, p.q_tiles, p.section_heads, 0);
        return tile_of_head<BM>(p.cu_seqlens_q, p.seq_q, p.sequences, found.head,
                                p.q_tiles - 1 - found.rank, pack_log2);
    }
    // Tile `number` of a head. Numbers ascend with the sequences: those of sequence b begin at
    // offsets[b] / BM + b. At most one number for each sequence has no rows.
    template <int BM>
    static __device__ Tile tile_of_head(const int* offsets, int total, int sequences, int head,
                                        int number, int pack_log2 = 0) {
        auto first_of = [&](int batch) {
            const long long rows = min(max(offsets[batch], 0), total);
            return static_cast<int>((rows << pack_log2) / BM) + batch;
        };
        int batch = 0;  // the last sequence that begins at `number` or before
        for (int more = sequences - 1; batch < more;) {
            const int middle = batch + (more - batch + 1) / 2;
            if (first_of(middle) <= number)
                batch = middle;
            else
                more = middle - 1;
        }
        return {batch, head, max(number - first_of(batch), 0)};
    }

 private:
    static __device__ Keys span(const int* offsets, int batch, int total) {
        const int first = min(max(offsets[batch], 0), total);
        return {first, min(max(offsets[batch + 1], first), total)};
    }
};

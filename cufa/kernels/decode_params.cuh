// What a launch passes to decode.cu, by value. cufa/specs/decode_block.py holds the same layout as
// a NumPy dtype.
#pragma once
#include "divisor.cuh"
#include "params.cuh"

struct DecodeParams {
    Tensor q, k, v, o;   // of a paged cache, stride_batch is that of a page
    float* lse;          // (batch, heads_q, seq_q), natural log; null when not wanted
    float* partial;      // 2 slots a block, see decode_merge.cuh; NOTHING before and after a launch
    const int* lengths;  // (batch); null: all are seq_kv
    float scale_log2;    // softmax scale times log2(e), > 0
    float unified_max;   // preset maximum times log2(e), where there is one
    int batch, heads_q, heads_kv;
    int seq_q, seq_kv;  // seq_kv: the most that a sequence can have
    int head_dim, head_dim_v;
    int ends;    // tiles as which a work item's end counts in an equal range
    int spread;  // eighths of an equal range that an equal split may have, and `ends` more; 0: any
    Divisor group;      // query heads that share a KV head
    Divisor row_tiles;  // of the group * seq_q rows that share a KV head
    Divisor items;      // work items of a sequence: heads_kv * row_tiles
    Divisor splits;     // equal splits of a work item, where blocks do not have equal ranges
};

// Then the parameters of the score's parts and of the way of finding K and V, where these have any.
template <class SCORE, class KV>
struct DecodeArguments : DecodeParams, SCORE, KV {};

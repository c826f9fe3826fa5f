// The parameters that a launch passes to decode.cu, by value. cufa/specs/decode_block.py holds the
// same layout as a NumPy dtype.
#pragma once
#include "divisor.cuh"
#include "params.cuh"

struct DecodeParams {
    Tensor q, k, v, o;  // of a paged cache, stride_batch is that of a page
    float* lse;         // (batch, heads_q, seq_q), natural log; null when not wanted
    float* partial;     // 2 places a block, see decode_merge.cuh; NOTHING before and after a launch
    const int* lengths;  // (batch); null: all are seq_kv
    float scale_log2;    // softmax scale times log2(e), > 0
    float unified_max;   // preset maximum times log2(e), where there is one
    int batch, heads_q, heads_kv;
    int seq_q, seq_kv;  // seq_kv: the most that a sequence can have
    int head_dim, head_dim_v;
    int splits;  // pieces of every unit; 0: as many as fit, or as the blocks' equal shares of all
                 // work fall
    int slack;   // tiles that an equal part of a unit may have more than this part of an equal
                 // share of all work:
    int spread;  // eighths of it
    int ends;    // tiles that a unit's end counts for in such a share
    Divisor group;      // query heads that share a KV head
    Divisor row_tiles;  // of the group * seq_q rows that share a KV head
    Divisor units;      // of a sequence: heads_kv * row_tiles
    Divisor blocks;     // of the launch
    Divisor parts;      // splits, or how many blocks there are for each unit
};

// The same, where K and V have 8 bits, and a float32 scale for each key and head.
struct ScaledParams : DecodeParams {
    Tensor k_scale, v_scale;  // as K and V, but for the last axis
};

// Then the parameters of the score's parts and of the way of finding K and V, where these have any.
template <class SCORE, class KV, class PARAMS = DecodeParams>
struct DecodeArguments : PARAMS, SCORE, KV {};
template <class SCORE, class KV>
using ScaledArguments = DecodeArguments<SCORE, KV, ScaledParams>;

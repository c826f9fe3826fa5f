// Parts that read arrays beside Q, K and V: slopes, biases, masks, sinks.
#pragma once
#include "part.cuh"
#include "ptx_convert.cuh"

// An array beside Q, K and V, (batch, heads) or (batch, heads, seq_q, seq_kv). Strides are in elements, 0 along an axis on
// which nothing depends.
template <class T>
struct OfHeads {
    const T* data;
    long long stride_batch, stride_head;

    __device__ const T* line(int batch, int head) const { return data + batch * stride_batch + head * stride_head; }
    __device__ T at(int batch, int head) const { return *line(batch, head); }
};
template <class T>
struct OfPairs {
    const T* data;
    long long stride_batch, stride_head, stride_query, stride_key;

    __device__ const T* row(const Pair& pair) const {
        return data + pair.batch * stride_batch + pair.head * stride_head + pair.query * stride_query;
    }
    __device__ T at(const Pair& pair) const { return row(pair)[pair.key * stride_key]; }
};

constexpr float LOG2_E = 1.442695040888963407f;

// Attention with linear biases (Press et al. 2022): the further a key is from where its query stands, the less it counts.
struct Alibi : Part<Alibi> {
    static constexpr bool LINEAR = false, TOGETHER = true, TILTS = true;
    OfHeads<float> alibi_slopes;

    // Distances are counted on in float32: the conversion of an integer takes as long as an exponential.
    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor, const At& at) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float slope = LOG2_E * alibi_slopes.at(at.batch, at.head(mt, h));
                const float first = static_cast<float>(at.query(mt, h) + sequence.diagonal() - at.key_of(0, 0));
#pragma unroll
                for (int i = 0; i < NT * 2; ++i) {
                    float& s = rS[mt][i / 2][2 * h + i % 2];
                    s = fmaf(s, factor, -slope * fabsf(first - static_cast<float>(i / 2 * 8 + i % 2)));
                }
            }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const {
        const float distance = fabsf(static_cast<float>(pair.query + pair.sequence.diagonal() - pair.key));
        return fmaf(-LOG2_E * alibi_slopes.at(pair.batch, pair.head), distance, s);
    }
    __device__ float step(const Pair& pair, int side) const {
        return side * LOG2_E * alibi_slopes.at(pair.batch, pair.head);
    }
    __device__ int turn(const Pair& pair) const { return pair.query + pair.sequence.diagonal() - pair.key; }
};

// What is added to a score.
template <class T>
struct Bias : Part<Bias<T>> {
    static constexpr bool LINEAR = false, STEADY = false;  // -inf hides keys
    OfPairs<T> bias;
    __device__ float score(float s, const Pair& pair) const { return fmaf(to_float(bias.at(pair)), LOG2_E, s); }
};
using BiasFloat16 = Bias<float16>;
using BiasBfloat16 = Bias<bfloat16>;
using BiasFloat32 = Bias<float>;

// Which keys are seen: a byte each, or a bit, the highest of a byte first; `stride_key` is that of bytes.
struct Mask : Part<Mask> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const { return !mask.at(pair); }
};
struct MaskBits : Part<MaskBits> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const {
        return !(mask.row(pair)[(pair.key >> 3) * mask.stride_key] >> (7 - pair.key % 8) & 1);
    }
};

// A logit of each head that takes part in the softmax, and has no value (gpt-oss).
struct Sinks : Part<Sinks> {
    static constexpr bool SINKS = true;
    const float* sinks;
    long long stride_head;
    __device__ float sink(int head) const { return sinks[head * stride_head]; }
};

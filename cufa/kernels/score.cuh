// What becomes of the scores S = Q K^T before the softmax: a Score is made of parts.
#pragma once

// Query i sees the keys j <= i + seq_kv - seq_q: aligned bottom-right.
struct Causal {};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class... Parts>
struct Score {
    static constexpr bool CAUSAL = (is_same<Parts, Causal> || ...);
};

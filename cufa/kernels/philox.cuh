// Random numbers that depend on nothing but their place.
#pragma once
#include "ptx.cuh"

// Philox4x32-10 (Salmon et al. 2011, section 4.3): makes four words of random bits from a counter
// of four words and a key.
__device__ inline void philox(uint32_t (&counter)[4], uint64_t seed) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xd2511f53u, counter[0]), low0 = 0xd2511f53u * counter[0];
        const uint32_t high1 = __umulhi(0xcd9e8d57u, counter[2]), low1 = 0xcd9e8d57u * counter[2];
        counter[0] = high1 ^ counter[1] ^ key[0], counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key[1], counter[3] = low0;
        key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u;
    }
}

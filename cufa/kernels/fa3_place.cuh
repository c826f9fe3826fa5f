// Where a consumer of fa3_wgmma.cu is: in which tile of rows, and at which tile of keys.
#pragma once
#include "epilogue_sm90.cuh"
#include "fa3_config.cuh"

// Broadcasts from lane 0, so that the compiler takes the value as the same in all lanes.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

template <class C>
struct Place {
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;

    const Arguments<SCORE, KV>& p;
    const Smem<C>& smem;
    const int consumer;
    // Row tiles (round) and key tiles (n) so far. Both start at -1 where the step that takes up the
    // first tile counts, too.
    uint32_t round = C::ACROSS ? -1u : 0, n = C::FOLDED ? -1u : 0;
    int j = 0, j_begin = 0;  // the tile of keys at hand, and this tile's first
    Visit<SCORE::HAS_BLOCK_MAP> visit,
        ahead;         // that tile among all tiles of keys, and the next one
    KeyTiles keys{};   // of this consumer's rows
    bool more = true;  // whether there is a tile under way

    __device__ Place(const Arguments<SCORE, KV>& p, const Smem<C>& smem, int consumer)
        : p(p), smem(smem), consumer(consumer) {}

    __device__ const volatile typename C::Work& work() const { return smem.work(round); }
    __device__ const volatile typename C::Work& work_before() const { return smem.work(round - 1); }
    __device__ int part() const { return C::APART ? consumer : 0; }
    // This warp's first row in the tile; computed at each use, for registers are scarce.
    static __device__ int warp_row() { return (reread_thread_index() - 128) / 32 * 16; }

    // The place of the keys at hand among all tiles of keys, and of the next ones.
    __device__ int key_tile() const { return visit.tile(j); }
    __device__ int next_key_tile() const { return ahead.tile(j - 1); }
    // Looks these up long before they are needed. An entry in front of the first is safe to read:
    // counts precede the list.
    __device__ void look_up() { visit = work().visits().visit(j); }
    __device__ void look_ahead() { ahead = work().visits().visit(j - 1); }

    __device__ bool at_first_keys() const { return j == j_begin; }
    __device__ bool has_next_keys() const { return j > keys.first; }
    // The part of the keys at hand that needs a mask; and that part of keys without row maxima.
    __device__ Masked masked() const { return SCORE::masked(keys, key_tile()); }
    __device__ Masked masked_left() const { return {false, masked().left}; }

    // Where this warp's scores are, of the tile's keys from `column` on.
    __device__ At at(int column) const {
        const volatile typename C::Work& work = this->work();
        return At{reread_thread_index() % 32,
                  work.q0 + warp_row(),
                  key_tile() * C::BN + column,
                  work.batch,
                  SCORE::CHANGES_EVERY_TILE ? work.head : 0,
                  p.pack_log2};
    }
    __device__ Sequence sequence(int batch) const {
        if constexpr (KV::TAILS)
            return work().lengths();
        else
            return KV::sequence(p, batch, 0);
    }
    // How many keys of this key tile exist. Only the first visited one can have fewer than BN.
    __device__ int keys_of_tile() const {
        if constexpr (KV::TAILS)
            if (at_first_keys() && static_cast<int>(round) >= 0)
                return work().sequence.seq_kv - key_tile() * C::BN;
        return C::BN;
    }

    // The rows of the tile before.
    __device__ PackedRows packed_rows() const {
        const volatile typename C::Work& work = work_before();
        const int batch = KV::RAGGED ? 0 : work.batch;
        if constexpr (KV::RAGGED)
            return PackedRows(p, work.lengths(), batch, work.head, work.q0 + warp_row());
        else
            return PackedRows(p, Dense::sequence(p, 0, 0), batch, work.head, work.q0 + warp_row());
    }
    // Whether some of the consumer's rows of the tile before are beyond its sequence.
    __device__ bool has_partial_rows() const {
        const volatile typename C::Work& work = work_before();
        int seq_q = p.seq_q;
        if constexpr (KV::RAGGED) seq_q = work.sequence.seq_q;
        return (work.q0 + consumer * 64 + 63) >> p.pack_log2 >= seq_q;
    }
};

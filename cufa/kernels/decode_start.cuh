// The start of a block of decode_block.cuh: it finds its share of the keys, and asks for Q and the
// first tiles.
#pragma once
#include "decode_keys.cuh"
#include "decode_query.cuh"

// The first unit of a block's share.
template <class C>
struct FirstUnit {
    using ARGUMENTS = typename C::ARGUMENTS;
    using Unit = typename C::Unit;
    using Keys = TeamKeys<C>;
    using Lengths = ::Lengths<ARGUMENTS, C::BN, C::TEAMS, C::WARPS, C::WHOLE>;
    static constexpr int BN = C::BN, TEAM = C::TEAM, TEAMS = C::TEAMS, STAGES = C::STAGES;
    static constexpr bool PAGED = C::KV::PAGED, LEFT_EDGE = C::SCORE::LEFT_EDGE;

    const ARGUMENTS& p;
    unsigned char* const smem;
    const uint32_t thread;
    const int warp, block;
    UnitRows rows;
    Pieces pieces;

    __device__ FirstUnit(const ARGUMENTS& p, unsigned char* smem, uint32_t thread, int warp,
                         int block, const typename C::Share& share)
        : p(p),
          smem(smem),
          thread(thread),
          warp(warp),
          block(block),
          rows(p, share.unit, C::BM),
          pieces(share.pieces(p, share.unit, block)) {}

    // The share is found before the kernel in front has ended, so that Q and keys can be asked for
    // at once when it has. If lengths or pages have changed by then, it is found again. Where
    // sequences are many, it is first guessed from the own length.
    __device__ void begin(Keys& keys, UnitQuery<C>& query) {
        for (bool in_front_has_ended = false;; in_front_has_ended = true) {
            Lengths lengths(p);
            // If a block has a whole unit, its pages are looked up together with its length,
            // unless the length says where they begin.
            const bool whole_unit = !LEFT_EDGE && (C::WHOLE || p.parts.divisor == 1);
            const int* known =
                whole_unit
                    ? keys.find_entries(min(p.units.quotient(block), p.batch - 1), warp / TEAM)
                    : nullptr;
            const int known_entry = keys.look_up(known);
            keys.share.find(p, block, keys_of_length(p, lengths.length), in_front_has_ended);
            keys.ask_from(warp / TEAM, keys.share.unit, known, known_entry);
            // All warps or none: barriers follow, and each warp may have read another length.
            const bool guesses = C::WHOLE || lengths.few || in_front_has_ended || p.splits ||
                                 !__syncthreads_or(!keys.share.is_even());
            const int first_entries = keys.entries, *first_entry = keys.find_entries_asked();
            rows = UnitRows(p, keys.share.unit, C::BM);
            pieces = keys.share.pieces(p, keys.share.unit, block);
            keys.keep_in_l2(rows, pieces);
            query.find_next(rows);
            keys.find_sources();
            lengths.find_again(p, keys.share.unit.batch);
            if (!in_front_has_ended) {
                query.prefetch();
                if (lengths.few && (TEAM == 4 || p.parts.divisor > 1)) keys.prefetch(warp);
            }
            computed_here(keys.k_from), computed_here(keys.v_from), computed_here(first_entry);
            computed_here(pieces.begin), computed_here(pieces.end);
            if (!in_front_has_ended) {
                wait_for_kernel_in_front(keys.share.count);
                if (!guesses) continue;
            }
            ask(keys, query, lengths, first_entry);
            if (in_front_has_ended) break;
            cp_async_wait<2 * STAGES>();
            if (holds(keys, lengths, first_entries)) break;
            cp_async_wait<0>();
        }
    }

 private:
    // The copies of Q, of lengths and a page for `holds`, and of the first keys.
    __device__ void ask(Keys& keys, const UnitQuery<C>& query, const Lengths& lengths,
                        const int* first_entry) const {
        const uint32_t look = smem_address(smem) + C::SUM + thread * C::LOOK_BYTES;
        query.copy(rows);
        lengths.look_again(p, look);
        if (PAGED) cp_async_4(look + 8, first_entry, first_entry != nullptr);
        cp_async_commit();
        // In front of a loop with loads, such as those from the table, the compiler waits for all
        // loads before.
        if (PAGED) keys.ask(0, Keys::BOTH, true);
#pragma unroll 1
        for (int i = PAGED; i < STAGES; ++i) keys.ask(i, Keys::BOTH, i == 0);
    }
    // Whether the share and its pages are as before, now that the kernel in front has ended.
    __device__ bool holds(Keys& keys, Lengths& lengths, int first_entries) const {
        const int* look = reinterpret_cast<const int*>(smem + C::SUM + thread * C::LOOK_BYTES);
        lengths.have_come(p, look);
        bool holds = lengths.hold(p, keys.share, reinterpret_cast<int (*)[2]>(smem + C::STATE)) &&
                     (!PAGED || look[2] == first_entries);
        // If the own length has changed, too, a share of the same tiles is the same, if those on
        // their way are whole.
        Unit& unit = keys.share.unit;
        const int keys_now = lengths.keys_now(p, unit.batch);
        if (unit.tiles > 0 && keys_now != unit.keys) {
            const int whole = unit.zero + min(keys_now, unit.keys) / BN;
            holds = holds && unit.is_same_with(p, keys_now) && keys.asked - TEAMS < whole;
            if constexpr (LEFT_EDGE)
                holds = holds && (warp / TEAM - unit.zero) * BN >=
                                     Unit::first_key_of(p, max(keys_now, unit.keys));
            unit.keys = keys.of_asked.keys = keys_now;
        }
        return __all_sync(0xffffffff, holds);
    }
};

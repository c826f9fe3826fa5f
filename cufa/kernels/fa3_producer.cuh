// The producer of fa3_wgmma.cu and fp8_wgmma.cu: one thread that copies tiles of Q, K and V to
// shared memory by TMA, and tells the consumers which tiles of rows they are for.
#pragma once
#include "fa3_config.cuh"

template <class C>
struct Producer {
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;
    static constexpr int BM = C::BM, BN = C::BN;
    static constexpr bool K_FIRST = C::SCHEDULE::K_FIRST && !C::ACROSS;
    static_assert(!K_FIRST || !C::FIRST, "the first K would wait for consumers that wait for Q");

    const Arguments<SCORE, KV>& p;
    const TensorMaps& maps;
    const Smem<C>& smem;
    const int tiles;  // of rows
    const unsigned long long policy_q;
    int skipped = 0;  // numbers that were drawn, and stand for no rows

    __device__ Producer(const Arguments<SCORE, KV>& p, const TensorMaps& maps, const Smem<C>& smem,
                        int tiles)
        : p(p), maps(maps), smem(smem), tiles(tiles), policy_q(policy_of_q(p)) {}

    // Several tiles of rows read K and V, and one reads Q: where they do not all fit L2, which has
    // 50 MB or more, Q leaves it first.
    static __device__ unsigned long long policy_of_q(const Params& p) {
        const long long rows =
            (static_cast<long long>(p.seq_q) << p.pack_log2) + p.seq_kv / p.group;
        const auto bytes = rows * p.heads * (p.head_dim + p.head_dim_v) * sizeof(typename C::T);
        return bytes <= 40 << 20 ? L2_NORMAL : L2_READ_ONCE;
    }

    __device__ Tile tile_of(int i) const {
        if constexpr (KV::RAGGED) return KV::template tile<BM>(p, i, p.pack_log2);
        const Tile tile = row_tile<C::UNEVEN>(p, i);
        if constexpr (C::Pairs::BYTES) {
            if (typename C::Pairs().belong_to_heads(p)) return by_heads(p, tile);
        }
        return tile;
    }
    __device__ bool has_rows(int i) const {
        const Tile tile = tile_of(i);
        const int q0 = (tile.q_tile * BM) >> p.pack_log2;
        return q0 < KV::sequence(p, tile.batch, q0).seq_q;
    }
    // The first round: 0. For packed sequences it is -1, a round without keys that looks for the
    // first tile, which begins 0.3 us later. The code that looks for tiles then exists once: with
    // two copies, kernels spill 28 to 44 bytes more, have a tenth more code and take 1.08 of the
    // time to compile.
    static constexpr uint32_t START = KV::RAGGED ? -1u : 0;
    static __device__ bool is_first(uint32_t round) { return START != 0 && round == START; }
    // The number of the tile after the i-th, which is the round-th of this block; in round -1, i
    // itself. Numbers that stand for no rows are skipped.
    __device__ int next(int i, uint32_t round) {
        if (!is_first(round))
            i = next_tile < C::UNEVEN || KV::TAILS > (p, i, tiles, round + skipped);
        for (; KV::RAGGED && i < tiles && !has_rows(i); ++skipped)
            i = next_tile<true>(p, i, tiles, round + skipped + 1);
        return i;
    }

    // Where the rows of a sequence begin. But if no row of the tile from q0 on sees a key, a place
    // far behind them, where TMA reads nothing and fills in zeros. (In an array of more than 2^30
    // rows it reads some, for nothing.)
    __device__ int first_row(const Sequence& sequence, int q0, int first) const {
        if constexpr (C::UNEVEN || KV::TAILS)
            if (p.sees(sequence, (q0 + BM - 1) >> p.pack_log2).end <= 0) return 1 << 30;
        return first;
    }
    __device__ KeyTiles keys_of(const Sequence& sequence, int q0, int part) const {
        constexpr int ROWS = BM / C::PARTS;
        const int first = q0 + ROWS * part, last = first + ROWS - 1;
        return p.template key_tiles<BN>(sequence, first >> p.pack_log2, last >> p.pack_log2);
    }

    // The n-th tile of keys of this block: K, and V, from `key` on.
    __device__ void load_k(int key, int head, int batch, uint32_t n) const {
        smem.ring_k.acquire(n);
        C::KTile::load(smem.k(n), 0, maps.k, smem.ring_k.expect(n, C::KTile::bytes), key, head,
                       batch, L2_KEPT);
    }
    __device__ void load_v(int key, int head, int batch, uint32_t n) const {
        smem.ring_v.acquire(n);
        C::VTile::load(smem.v(n), 0, maps.v, smem.ring_v.expect(n, C::VTile::bytes), key, head,
                       batch, L2_KEPT);
    }
    // Loads Q of the i-th tile of rows and hands the tile over, or says that there is none. The
    // first of its tiles of keys is the n-th of this block.
    __device__ void load_q(int i, uint32_t round, uint32_t n) const {
        volatile typename C::Work& work = smem.work(round);
        if (i >= tiles) {
            smem.ring_q.acquire(round);
#pragma unroll
            for (int c = 0; c < C::PARTS; ++c) work.keys[c].end = 0;
            smem.ring_q.expect(round, 0);
            return;
        }
        const Tile tile = tile_of(i);
        const int q0 = tile.q_tile * BM;
        const Sequence sequence = KV::sequence(p, tile.batch, q0 >> p.pack_log2);
        if constexpr (K_FIRST)
            load_k(first_row(sequence, q0, sequence.first_k) +
                       (keys_of(sequence, q0, C::PARTS - 1).end - 1) * BN,
                   KV::map_head(p.k, tile.head / p.group), KV::map_batch(p.k, tile.batch), n);
        smem.ring_q.acquire(round);
        work.q0 = q0, work.head = tile.head, work.batch = tile.batch;
        if constexpr (KV::TAILS) work.set(sequence);
#pragma unroll
        for (int c = 0; c < C::PARTS; ++c) {
            KeyTiles keys = keys_of(sequence, q0, c);
            if constexpr (SCORE::HAS_BLOCK_MAP) {
                const BlockLine line =
                    p.template block_line<BN>(p.seq_kv, tile.batch, tile.head, tile.q_tile);
                line.count(keys.first, keys.end);
                work.entries = line.visits().entries;
            }
            work.keys[c].end = keys.end, work.keys[c].whole_end = keys.whole_end;
            if constexpr (C::FIRST)
                work.keys[c].first = keys.first, work.keys[c].whole_first = keys.whole_first;
        }
        const uint32_t bar = smem.ring_q.expect(round, C::QTile::bytes);
        const int first_q = first_row(sequence, q0, sequence.first_q);
#pragma unroll 1
        for (int row = 0; row < BM; row += 64)
            C::QTile::load(smem.q(round), row, maps.q, bar, first_q + ((q0 + row) >> p.pack_log2),
                           tile.head, KV::RAGGED ? 0 : tile.batch, policy_q);
    }

    // The tile of keys, from end - 1 down to `first`, with which the next Q is asked for: its slot
    // should be free then. With one slot, that is the last; with three, or with two if O is written
    // from registers, the first. Otherwise the slot is free when the last O has been written, about
    // when the first V are done with: it is the tile number STAGES, or the last. It cannot be an
    // earlier one: consumers that skip keys free the slot only after the loads up to that one.
    static __device__ int load_q_at(int first, int end) {
        if (C::Q_STAGES == 1) return first;
        return C::Q_STAGES == 3 || C::O_FROM_REGISTERS ? end - 1 : max(first, end - 1 - C::STAGES);
    }

    __device__ void run() {
        int i = block_index();
        if (START == 0) load_q(i, 0, 0);
        uint32_t n = START;  // tiles of keys so far
        for (uint32_t round = START; is_first(round) || i < tiles; ++round) {
            const bool has_keys = !is_first(round);
            const volatile typename C::Work& work = smem.work(round);
            const int first = C::FIRST && has_keys ? work.first() : 0;
            const int end = has_keys ? work.end() : 1;
            const int kv_head = work.head / p.group, batch = work.batch;
            const Visits<SCORE::HAS_BLOCK_MAP> visits = work.visits();
            const int k_head = KV::map_head(p.k, kv_head), k_batch = KV::map_batch(p.k, batch);
            const int v_head = KV::map_head(p.v, kv_head), v_batch = KV::map_batch(p.v, batch);
            int first_k = 0;
            if constexpr (KV::RAGGED) first_k = work.sequence.first_k;
            if constexpr (KV::TAILS)
                first_k = first_row(work.lengths(), work.q0, first_k);
            else
                first_k = first_row(KV::sequence(p, batch, 0), work.q0, first_k);
            const int q_at = load_q_at(first, end);
            i = next(i, round);
            auto visit = visits.visit(end - 1);
            if (!K_FIRST && has_keys)
                load_k(first_k + visit.tile(end - 1) * BN, k_head, k_batch, n);
            for (int j = end - 1; j >= first; --j, ++n) {
                // Looked up before the slot of its K is free
                const auto ahead = visits.visit(j - 1);
                if (j > first) load_k(first_k + ahead.tile(j - 1) * BN, k_head, k_batch, n + 1);
                if (has_keys) load_v(first_k + visit.tile(j) * BN, v_head, v_batch, n);
                if (j == q_at) load_q(i, round + 1, n + 1);
                visit = ahead;
            }
        }
    }
};

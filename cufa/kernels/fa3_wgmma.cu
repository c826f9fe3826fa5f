// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2) on Hopper, for float16 and bfloat16, sm_90a.
// A block works through tiles of BM rows of Q. The producer, one thread of the first warpgroup, fetches tiles of Q, K and
// V by TMA into rings in shared memory. The consumers, the other warpgroups, compute 64 rows each with wgmma. S of the
// next keys is queued before P V of the present ones, so that the softmax runs while the tensor cores work. Keys are taken
// last to first: masked ones, which need row maxima, come first, and the others do without, see softmax.cuh. With
// PING_PONG the consumers take turns to queue their products: one's softmax then runs under the products of the others.
#include "epilogue_sm90.cuh"
#include "kv.cuh"
#include "pair_tiles_sm90.cuh"
#include "params.cuh"
#include "ptx_sm90.cuh"
#include "rescore_sm90.cuh"
#include "scheduler_sm90.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"
#include "tilt.cuh"

// Forms of a consumer's step, by the keys that it takes up: those that need row maxima, those that do without, either, chosen where
// it runs; after a tile's last ones the next tile's first, or none; CHECKED or FIRST, chosen where it runs.
enum class Form { CHECKED, UNCHECKED, EITHER, FIRST, NONE, CHECKED_OR_FIRST };
template <Form FORM>
struct As {
    static constexpr Form form = FORM;
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, bool PING_PONG,
          class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa3_wgmma(const __grid_constant__ TmaArguments<Arguments<SCORE, KV>> arguments) {
    const Arguments<SCORE, KV>& p = arguments.params;
    const SCORE& score = p;
    const TensorMaps& maps = arguments.maps;
    constexpr int CONSUMERS = BM / 64;  // warpgroups
    static_assert(WARPS == 4 * (CONSUMERS + 1), "a producer and BM / 64 consumers");
    // Registers of a thread at launch, at most, and after the producer has left most of its own to the consumers: it can do with 32,
    // and keeps up to 40 where theirs, a multiple of 8, leave some.
    constexpr int REGISTERS = 65536 / (WARPS * 32 * BLOCKS_PER_SM) / 8 * 8;
    constexpr int SHARE = (REGISTERS * (CONSUMERS + 1) - 32) / CONSUMERS / 8 * 8;
    constexpr int REGISTERS_CONSUMER = SHARE < 240 ? SHARE : 240;
    constexpr int REST = REGISTERS * (CONSUMERS + 1) - REGISTERS_CONSUMER * CONSUMERS;
    constexpr int REGISTERS_PRODUCER = REST < 40 ? REST : 40;
    constexpr int NT = BN / 8, OT = HEAD_DIM_V / 8;  // 8-column pieces of S and of O
    // Row maxima can be done without where a row's first scores tell about the others, and tilts rise by less from tile to tile.
    constexpr bool UNCHECKED = SCORE::STEADY;
    constexpr float STEEP_LOG2 = 60.f;
    // Whether tiles of rows visit different keys, and whether their consumers do, each for itself.
    constexpr bool UNEVEN = SCORE::LEFT_EDGE || SCORE::RIGHT_EDGE || SCORE::BLOCKS;
    constexpr bool APART = UNEVEN && !SCORE::BLOCKS;
    constexpr int PARTS = APART ? CONSUMERS : 1;
    constexpr bool FIRST = SCORE::LEFT_EDGE || SCORE::BLOCKS;  // whether not all begin with the first keys

    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    using VTile = WgmmaTile<BN, HEAD_DIM_V>;
    using OTile = WgmmaTile<BM, HEAD_DIM_V>;
    // O leaves through the slot that its Q came in: of a slot, a warp reads and writes 16 rows, which are its own. Up to
    // three slots, if they fit beside what the system and the barriers take: the next Q then comes early.
    constexpr int QO_BYTES = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    constexpr int KV_BYTES = STAGES * (KTile::bytes + VTile::bytes);
    using Pairs = PairTiles<SCORE, BN>;  // a warp's, of biases and masks
    constexpr int PAIR_BYTES = BM / 16 * Pairs::BYTES;
    static_assert(!Pairs::BYTES || !SCORE::STEADY, "what is read once is not there for scores that are computed once more");
    constexpr auto fits = [](int slots) {
        return (slots * QO_BYTES + KV_BYTES + PAIR_BYTES + 1024) * BLOCKS_PER_SM <= 227 * 1024;
    };
    constexpr int Q_STAGES = fits(3) ? 3 : fits(2) ? 2 : 1;
    // With fewer than three, a slot is free when the last S has been computed, and O is written from registers, if there are enough:
    // else the next Q but one would wait for it. O is then written after the next Q has come, or two more: so long a tile's Work
    // is kept.
    constexpr bool O_FROM_REGISTERS = Q_STAGES == 1 || (Q_STAGES == 2 && CONSUMERS < 3);
    constexpr int WORK_STAGES = O_FROM_REGISTERS ? 2 * Q_STAGES : Q_STAGES;
    // Whether a tile's first K is asked for in front of its Q, whose only slot is free later: not where consumers free some of the
    // tile before when they take up its Q, nor of the widest rows with a mask, which wait for Q longer, nor of three consumers, which
    // would spill more.
    constexpr bool K_FIRST = Q_STAGES == 1 && CONSUMERS < 3 && !SCORE::LEFT_EDGE && !SCORE::BLOCKS &&
                             !(SCORE::RIGHT_EDGE && HEAD_DIM > 192);
    // Whether the first S of a tile is computed beside the last O of the one before.
    constexpr bool ACROSS = Q_STAGES > 1;
    // Whether keys that need row maxima, a tile's first ones, and those of a block's first tile share a step. That takes two thirds
    // of the time to compile, and up to 1.02 of it to run: of wide tiles whose scores take long to compile.
    constexpr bool FOLDED = ACROSS && BN > 64 && (!SCORE::LINEAR || SCORE::LEFT_EDGE || SCORE::BLOCKS || KV::RAGGED);
    // Whether keys on several pieces of a tilt are among those that need row maxima: of two consumers. Scores that are computed one by
    // one then stand in one form of the step. Three have no registers for it.
    constexpr bool TURNS_CHECKED = FOLDED && CONSUMERS == 2 && SCORE::TILTS && !SCORE::BEHIND;
    constexpr int TILT_ROWS = TURNS_CHECKED ? 64 : 16;  // those of a warpgroup, or a warp's, are on the same pieces
    // Else, where O is wide, one loop over the keys: two take long to compile. In it O is waited for after the exponentials, which
    // then run under the one consumer's own O, if there is but one on the multiprocessor.
    constexpr bool ONE_LOOP = HEAD_DIM_V > 128 && !FOLDED;
    // Whether O is waited for in front of the softmax: of three consumers, the others keep the tensor cores busy. P that comes out of
    // the curve or of what stands for it is packed in either branch then, as ptxas does not mix what follows a branch with its
    // exponentials, which leave room for that; of float16, whose curve takes more registers, they do not.
    constexpr bool O_FIRST = CONSUMERS == 3;
    constexpr bool PACKS_EARLY = O_FIRST && SCORE::CURVES && SCORE::CURVE_TERMS == 3;
    static_assert(!PACKS_EARLY || !SCORE::TILTS, "lines do not pack");
    // Whether each thread frees a slot of Q, or one of each consumer for all that it has waited for, and the tile's Work with it. The
    // second takes less time where there are several consumers; of one, racecheck does not see that it is enough.
    constexpr bool ALL_FREE_Q = O_FROM_REGISTERS || CONSUMERS == 1;
    constexpr int PAIRS = Q_STAGES * QO_BYTES + KV_BYTES, BARRIERS = PAIRS + PAIR_BYTES;
    constexpr int WORK = BARRIERS + 16 * Q_STAGES + 32 * STAGES;
    // Keys may be masked for all rows of a consumer, if not for all of another's: it skips them. With more than one slot of Q
    // it still holds the last V of the tile before.
    constexpr bool SKIPS = APART && CONSUMERS > 1;
    constexpr int EDGES = SCORE::LEFT_EDGE + SCORE::RIGHT_EDGE;
    static_assert(!SKIPS || EDGES * ((BM - 64 + BN - 1) / BN) <= STAGES, "as many stages as tiles of keys that are skipped");

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem), sK = sQ + Q_STAGES * QO_BYTES, sV = sK + STAGES * KTile::bytes;
    const uint32_t barriers = sQ + BARRIERS;
    const Ring<Q_STAGES> ring_q(barriers);
    const Ring<STAGES> ring_k(barriers + ring_q.bytes), ring_v(barriers + ring_q.bytes + ring_k.bytes);
    using WorkOfTile = Work<PARTS, KV::TAILS, SCORE::BLOCKS>;
    // The tiles under way. Consumers look theirs up at each use, for registers are scarce.
    volatile WorkOfTile* sWork = reinterpret_cast<WorkOfTile*>(smem + WORK);
    const int tiles = p.heads * p.q_tiles;

    if (threadIdx.x == 0) {
        tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
        if (dynamic_smem_bytes() < WORK + WORK_STAGES * sizeof(WorkOfTile)) __trap();
        ring_q.init(ALL_FREE_Q ? 128 * CONSUMERS : CONSUMERS), ring_k.init(4 * CONSUMERS), ring_v.init(4 * CONSUMERS);
        mbarrier_fence_init();
    }
    __syncthreads();
    wait_for_kernel_in_front();  // from here on, memory is as it left it

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the same in all lanes, for the compiler
    if (warpgroup == 0) {
        // Producer
        registers_decrease<REGISTERS_PRODUCER>();
        launch_dependents();
        if (threadIdx.x != 0) return;
        // K and V are read by several tiles of rows, and Q by one: where not all fits L2, of 50 MB or more, Q leaves it first.
        const long long rows = (static_cast<long long>(p.seq_q) << p.pack_log2) + p.seq_kv / p.group;
        const bool fits_l2 = rows * p.heads * (p.head_dim + p.head_dim_v) * sizeof(T) <= 40 << 20;
        const unsigned long long policy_q = fits_l2 ? L2_NORMAL : L2_READ_ONCE;
        auto tile_of = [&](int i) -> Tile {
            if constexpr (KV::RAGGED) return KV::template tile<BM>(p, i, p.pack_log2);
            const Tile tile = tile_in_order<UNEVEN>(p, i);
            if constexpr (Pairs::BYTES) {
                if (Pairs().belong_to_heads(score)) return by_heads(p, tile);
            }
            return tile;
        };
        // The n-th tile of keys of this block: K from `key` on.
        auto load_keys = [&](int key, int head, int batch, uint32_t n) {
            ring_k.acquire(n);
            KTile::load(sK + ring_k.slot(n) * KTile::bytes, 0, maps.k, ring_k.expect(n, KTile::bytes), key, head, batch, L2_KEPT);
        };
        // Where the rows of a sequence begin; or, for a tile from q0 on none of whose rows sees a key, far behind (beyond 2^30 rows are
        // read for nothing), where TMA reads nothing and fills in zeros.
        auto first_row = [&](const Sequence& sequence, int q0, int first) {
            if constexpr (UNEVEN || KV::TAILS)
                if (score.sees(sequence, (q0 + BM - 1) >> p.pack_log2).end <= 0) return 1 << 30;
            return first;
        };
        // Hands the tile over, or says that there is none; the first of its tiles of keys is the n-th.
        auto load_q = [&](int i, uint32_t round, uint32_t n) {
            volatile WorkOfTile& work = sWork[round % WORK_STAGES];
            if (i >= tiles) {
                ring_q.acquire(round);
#pragma unroll
                for (int c = 0; c < PARTS; ++c) work.keys[c].end = 0;
                ring_q.expect(round, 0);
                return;
            }
            const Tile tile = tile_of(i);
            const Sequence sequence = KV::sequence(p, tile.batch);
            const int q0 = tile.q_tile * BM;
            auto keys_of = [&](int part) {
                constexpr int ROWS = BM / PARTS;
                return score.template key_tiles<BN>(sequence, (q0 + ROWS * part) >> p.pack_log2,
                                                    (q0 + ROWS * part + ROWS - 1) >> p.pack_log2);
            };
            if constexpr (K_FIRST)
                load_keys(first_row(sequence, q0, sequence.first_k) + (keys_of(PARTS - 1).end - 1) * BN,
                          KV::map_head(p.k, tile.head / p.group), KV::map_batch(p.k, tile.batch), n);
            ring_q.acquire(round);
            work.q0 = q0, work.head = tile.head, work.batch = tile.batch;
            if constexpr (KV::TAILS) work.set(sequence);
#pragma unroll
            for (int c = 0; c < PARTS; ++c) {
                KeyTiles keys = keys_of(c);
                if constexpr (SCORE::BLOCKS) {
                    const BlockLine line = score.template block_line<BN>(p.seq_kv, tile.batch, tile.head, tile.q_tile);
                    line.count(keys.first, keys.end);
                    work.entries = line.visits().entries;
                }
                work.keys[c].end = keys.end, work.keys[c].whole_end = keys.whole_end;
                if constexpr (FIRST) work.keys[c].first = keys.first, work.keys[c].whole_first = keys.whole_first;
            }
            const uint32_t bar = ring_q.expect(round, QTile::bytes);
            const int first_q = first_row(sequence, q0, sequence.first_q);
#pragma unroll 1
            for (int row = 0; row < BM; row += 64)
                QTile::load(sQ + ring_q.slot(round) * QO_BYTES, row, maps.q, bar,
                            first_q + ((q0 + row) >> p.pack_log2), tile.head, KV::RAGGED ? 0 : tile.batch, policy_q);
        };
        // Of sequences of unequal lengths, a round -1 without keys takes up the first tile, 0.3 us later: what looks for tiles then
        // stands in the code once, and it compiles in 0.85 of the time.
        constexpr uint32_t START = KV::RAGGED ? -1u : 0;
        auto is_first = [](uint32_t round) { return START != 0 && round == START; };
        // The tile that follows the i-th, the round-th of this block, or in round -1 the i-th; where some numbers stand for no rows,
        // the first that has any, with `skipped` more numbers drawn.
        int skipped = 0;
        auto has_rows = [&](int i) {
            const Tile tile = tile_of(i);
            return (tile.q_tile * BM) >> p.pack_log2 < KV::sequence(p, tile.batch).seq_q;
        };
        auto next = [&](int i, uint32_t round) {
            if (!is_first(round)) i = next_tile<UNEVEN || KV::TAILS>(p, i, tiles, round + skipped);
            for (; KV::RAGGED && i < tiles && !has_rows(i); ++skipped)
                i = next_tile<true>(p, i, tiles, round + skipped + 1);
            return i;
        };
        int i = block_index();
        if (START == 0) load_q(i, 0, 0);
        for (uint32_t round = START, n = START; is_first(round) || i < tiles; ++round) {  // n: tiles of keys so far
            const bool has_keys = !is_first(round);
            const volatile WorkOfTile& work = sWork[round % WORK_STAGES];
            const int first = FIRST && has_keys ? work.first() : 0, end = has_keys ? work.end() : 1;
            const int kv_head = work.head / p.group, batch = work.batch;
            const Visits<SCORE::BLOCKS> visits = work.visits();
            const int k_head = KV::map_head(p.k, kv_head), k_batch = KV::map_batch(p.k, batch);
            const int v_head = KV::map_head(p.v, kv_head), v_batch = KV::map_batch(p.v, batch);
            int first_k = 0;
            if constexpr (KV::RAGGED) first_k = work.sequence.first_k;
            if constexpr (KV::TAILS)
                first_k = first_row(work.lengths(), work.q0, first_k);
            else
                first_k = first_row(KV::sequence(p, batch), work.q0, first_k);
            auto load_k = [&](int j, const auto& visit, uint32_t n) {
                load_keys(first_k + visit.tile(j) * BN, k_head, k_batch, n);
            };
            auto load_v = [&](int j, const auto& visit, uint32_t n) {
                ring_v.acquire(n);
                VTile::load(sV + ring_v.slot(n) * VTile::bytes, 0, maps.v, ring_v.expect(n, VTile::bytes),
                            first_k + visit.tile(j) * BN, v_head, v_batch, L2_KEPT);
            };
            // The next Q is asked for when its slot should be free: of several at once, of one at the end; of two when the last O
            // has been written, which is about when the first V are done with. There never before V number STAGES: until then,
            // consumers that skip keys free the slot only after the loads that come later here.
            const int load_q_at = Q_STAGES == 1 ? first : Q_STAGES == 3 || O_FROM_REGISTERS ? end - 1 : max(first, end - 1 - STAGES);
            i = next(i, round);
            auto visit = visits.visit(end - 1);
            if (!K_FIRST && has_keys) load_k(end - 1, visit, n);
            for (int j = end - 1; j >= first; --j, ++n) {
                const auto ahead = visits.visit(j - 1);  // looked up before the slot of its K is free
                if (j > first) load_k(j - 1, ahead, n + 1);
                if (has_keys) load_v(j, visit, n);
                if (j == load_q_at) load_q(i, round + 1, n + 1);
                visit = ahead;
            }
        }
    } else {
        // Consumers
        registers_increase<REGISTERS_CONSUMER>();
        const int consumer = warpgroup - 1, part = APART ? consumer : 0;
        // This warp's first row in the tile; computed anew at each use, for registers are scarce.
        auto warp_row = [] { return (thread_index_anew() - 128) / 32 * 16; };
        const Turns<CONSUMERS, PING_PONG> turns(consumer);
        const uint32_t operand_q = QTile::operand(sQ + consumer * 64 * QTile::ROW_BYTES);
        const uint32_t operand_k = KTile::operand(sK), operand_v = VTile::operand(sV);

        // m: wide O leaves no registers for it, nor do tilts of tiles as wide as those of narrow O.
        constexpr bool TWICE = HEAD_DIM_V <= 128 && !(SCORE::TILTS && HEAD_DIM_V <= 64);
        OnlineSoftmax<1, false, PScale<T>::AT_MAX_LOG2, TWICE> softmax(SCORE::LINEAR    ? p.scale_log2
                                                                       : Pairs::NATURAL ? LOG2_E
                                                                                        : 1.f);
        float rO[1][OT][4] = {};
        float rS[1][NT][4];
        uint32_t rP[BN / 16][4];
        // Tiles and tiles of keys so far; less one where taking up the first counts, too.
        uint32_t round = ACROSS ? -1u : 0, n = FOLDED ? -1u : 0;
        int j = 0, j_begin = 0;  // the tile of keys at hand, and this tile's first
        Visit<SCORE::BLOCKS> visit, ahead;  // that tile among all tiles of keys, and the next one
        KeyTiles keys{};            // of this consumer's rows
        bool more = true;           // whether there is a tile under way
        Tilt<SCORE::TILTS> tilt;    // of this thread's rows
        SumLimits<PScale<T>, SCORE::CURVES> limits;

        auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };  // the same in all lanes, for the compiler

        // Where this warp's scores are, of the tile's keys from `column` on.
        auto place = [&](int column) {
            const volatile WorkOfTile& work = sWork[round % WORK_STAGES];
            return At{thread_index_anew() % 32, work.q0 + warp_row(), visit.tile(j) * BN + column, work.batch,
                      SCORE::EVERYWHERE ? work.head : 0, p.pack_log2};
        };
        auto sequence_of = [&](int batch) {
            if constexpr (KV::TAILS)
                return sWork[round % WORK_STAGES].lengths();
            else
                return KV::sequence(p, batch);
        };
        // Queues S = Q K^T, when it is this consumer's turn. Without a tile, of what is there; it is not looked at.
        auto queue_s = [&](bool loaded) {
            turns.wait();
            if (loaded) ring_k.wait(n);
            wgmma_fence();
            queue_product<T, QTile, KTile>(rS[0], operand_q + ring_q.slot(round) * (QO_BYTES >> 4),
                                           operand_k + ring_k.slot(n) * (KTile::bytes >> 4));
            wgmma_commit();
        };
        // What lies behind a sequence's last key may be anything, and 0 times that NaN: zeros in its place, from key `end` of
        // the tile on. Each consumer writes its own; the others' are the same.
        auto clear_tail = [&](uint32_t i, int end) {
            if (end >= BN) return;
            const int first = max(end, 0) * VTile::CHUNKS;
#pragma unroll 1
            for (int chunk = first + thread_index_anew() % 128; chunk < BN * VTile::CHUNKS; chunk += 128)
                sts_128(sV + ring_v.slot(i) * VTile::bytes + VTile::offset(chunk / VTile::CHUNKS, chunk % VTile::CHUNKS),
                        make_float4(0.f, 0.f, 0.f, 0.f));
            fence_proxy_async();
            named_barrier_sync(8 + consumer, 128);
        };
        auto queue_o = [&](uint32_t i, bool loaded, bool first, int end) {  // O += P V, or O = P V
            if (loaded) ring_v.wait(i);
            if (KV::TAILS) clear_tail(i, end);
            wgmma_fence();
            queue_product<T, VTile>(rO[0], rP, operand_v + ring_v.slot(i) * (VTile::bytes >> 4), !first);
            wgmma_commit();
        };
        auto release_k = [&] {
            ring_k.release(n);
            // After the last S. All threads arrive, as each has looked up what this tile and the one before are.
            if (O_FROM_REGISTERS && j == keys.first) ring_q.arrive(round);
        };
        // The place of the keys at hand among all tiles of keys, and of the next ones.
        auto key_tile = [&] { return visit.tile(j); };
        auto next_key_tile = [&] { return ahead.tile(j - 1); };
        // Looks these up, long before they are asked for; behind a tile's last keys there is something, too.
        auto look_up = [&] { visit = sWork[round % WORK_STAGES].visits().visit(j); };
        auto look_ahead = [&] { ahead = sWork[round % WORK_STAGES].visits().visit(j - 1); };
        auto pairs = [&] { return Pairs{sQ + PAIRS + (thread_index_anew() - 128) / 32 * Pairs::BYTES}; };
        auto pack_p = [&] {
            if constexpr (SCORE::DROPS_WEIGHTS) {
                const volatile WorkOfTile& work = sWork[round % WORK_STAGES];
                const At at{thread_index_anew() % 32, work.q0 + warp_row(), key_tile() * BN, work.batch, work.head, p.pack_log2};
                score.drop(rS, at);
            }
#pragma unroll
            for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rP[kk][i] = pack2<T>(rS[0][2 * kk + i / 2][i % 2 * 2], rS[0][2 * kk + i / 2][i % 2 * 2 + 1]);
            if constexpr (Pairs::BYTES) {  // S is not needed any more
                if (more && j > keys.first) pairs().template fill_others<true>(score, next_key_tile() * BN);
            }
        };
        // Frees those V from the i-th on whose keys were skipped.
        auto skip_v = [&](uint32_t i) {
            for (; SKIPS && i < n; ++i) ring_v.pass_over(i);
        };
        // Frees the slot of Q that the last O was written from.
        auto free_q = [&] {
            if (!O_FROM_REGISTERS && static_cast<int>(round) > 0) release_after_store<ALL_FREE_Q>(ring_q, round - 1);
        };

        // The rows of the tile before.
        auto packed_rows = [&]() -> PackedRows {
            const volatile WorkOfTile& work = sWork[(round - 1) % WORK_STAGES];
            if constexpr (KV::TAILS)
                return PackedRows(p, work.lengths(), KV::RAGGED ? 0 : work.batch, work.head, work.q0 + warp_row());
            else
                return PackedRows(p, KV::sequence(p, 0), work.batch, work.head, work.q0 + warp_row());
        };

        // Whether some of the consumer's rows of the tile before are beyond its sequence.
        auto has_partial_rows = [&] {
            const volatile WorkOfTile& work = sWork[(round - 1) % WORK_STAGES];
            int seq_q = p.seq_q;
            if constexpr (KV::RAGGED) seq_q = work.sequence.seq_q;
            return (work.q0 + consumer * 64 + 63) >> p.pack_log2 >= seq_q;
        };

        // The scores of keys from the tile's `column` on, as the softmax takes them. What has `tiles` is read there.
        auto apply_score = [&](auto& rS, int column, Masked masked, const auto& tiles) {
            if (!SCORE::EVERYWHERE && !masked.right && !masked.left) return;
            const At at = place(column);
            score.apply(rS, sequence_of(at.batch), p.scale_log2, at, masked, visit.is_partial(), tiles);
        };
        // Takes up a tile of rows, and starts to copy what the score reads of its first keys.
        auto begin_pairs = [&] {
            const At at = place(0);
            const Sequence sequence = sequence_of(at.batch);
            pairs().aim(score, sequence, at);
            pairs().template fill<false>(score, at.key, sequence.seq_kv);
            pairs().template fill_others<false>(score, at.key, sequence.seq_kv);
        };
        // Takes up what grows evenly over the keys at hand, if no more is asked of each pair.
        auto find_tilt = [&](auto& tilt, const At& at) {
            if (SCORE::PAIRWISE && visit.is_partial()) return false;
            return tilt.template find<BN, TILT_ROWS>(score, sequence_of(at.batch), at);
        };
        // Then adds it.
        auto tilt_score = [&](auto& tilt, const At& at) {
            if (!find_tilt(tilt, at)) return false;
            const float scale_log2 = parameter_anew(p.scale_log2);
            const float first[2] = {tilt.of(0, at.key_of(0, 0)), tilt.of(1, at.key_of(0, 0))};
#pragma unroll
            for (int i = 0; i < NT * 4; ++i) {
                const int h = i / 2 % 2, column = i / 4 * 8 + i % 2;
                float& s = rS[0][i / 4][i % 4];
                s = fmaf(s, scale_log2, fmaf(tilt.step[h], static_cast<float>(column), first[h]));
            }
            return true;
        };
        // Else scores are computed one by one, 16 keys at a time, as S moves past: that is rare, and code takes time to compile. All at
        // once of three consumers, which would spill more, and beside wide O, if it is for infinite ones alone: 1.03 otherwise.
        auto change_score = [&](const Sequence& sequence, At at) {
            if constexpr (CONSUMERS == 3 || (ONE_LOOP && SCORE::BEHIND)) {
                score.change(rS, sequence, p.scale_log2, at, visit.is_partial());
            } else {
#pragma unroll 1
                for (int i = 0; i < NT / 2; ++i, at.key += 16) {
                    float some[1][2][4];
#pragma unroll
                    for (int e = 0; e < 8; ++e) some[0][e / 4][e % 4] = rS[0][e / 4][e % 4];
                    score.change(some, sequence, p.scale_log2, at, visit.is_partial());
#pragma unroll
                    for (int e = 0; e < NT * 4 - 8; ++e) rS[0][e / 4][e % 4] = rS[0][e / 4 + 2][e % 4];
#pragma unroll
                    for (int e = 0; e < 8; ++e) rS[0][NT - 2 + e / 4][e % 4] = some[0][e / 4][e % 4];
                }
            }
        };
        // P = exp(S - m), m being raised to the row maxima where it must. Whether O must follow it.
        auto exponentiate_checked = [&] {
            release_k();
            if constexpr (Pairs::BYTES) {
                pairs().wait();
                apply_score(rS, 0, SCORE::masked(keys, key_tile()), pairs());
                if (j > keys.first) pairs().template fill<true>(score, next_key_tile() * BN);
            } else if constexpr (SCORE::TILTS) {
                const At at = place(0);
                const Sequence sequence = sequence_of(at.batch);
                if (!tilt_score(tilt, at)) change_score(sequence, at);
                score.mask(rS, sequence, at, SCORE::masked(keys, key_tile()));
            } else {
                apply_score(rS, 0, SCORE::masked(keys, key_tile()), NoTiles());
            }
            const bool raised = softmax.raise(rS);
            softmax.exponentiate(rS);
            if constexpr (SCORE::CURVES) limits.follow(softmax, score.curve(p.scale_log2).end);
            return raised;
        };
        // The masks of keys that need no row maxima.
        auto masked_left = [&] { return Masked{false, SCORE::masked(keys, key_tile()).left}; };
        // P = exp(S - m) without looking for row maxima: m is near the score of a key that the row has seen, or NONE.
        auto exponentiate_unchecked = [&](auto take_p) {
            const Masked masked = masked_left();
            auto mask = [&] {
                if (masked.left) {
                    const At at = place(0);
                    score.mask(rS, sequence_of(at.batch), at, masked);
                }
            };
            if constexpr (SCORE::TILTS) {
                const At at = place(0);
                if (find_tilt(tilt, at)) {
                    mask();
                    const float scale_log2 = parameter_anew(p.scale_log2);
                    const float first[2] = {tilt.of(0, at.key_of(0, 0)), tilt.of(1, at.key_of(0, 0))};
                    softmax.exponentiate(rS, [&](float s, float m, int h, int column) {
                        return fmaf(s, scale_log2, fmaf(tilt.step[h], static_cast<float>(column), first[h] - m));
                    });
                    return;
                }
                if constexpr (SCORE::BEHIND || TURNS_CHECKED) {  // infinite ones: `correct` computes these scores
                    softmax.l[0][0] += INF, softmax.l[0][1] += INF;
                    return;
                }
            }
            if constexpr (SCORE::CURVES) {
                if (limits.curved) {
                    const auto curve = score.curve(p.scale_log2);
                    mask();
                    softmax.exponentiate(rS, [&](float s, float m, int, int) { return fmaf(s, curve(s), -m); });
                    take_p();
                    return;
                }
                score.cap(rS, p.scale_log2);
                mask();
            } else if constexpr (SCORE::LINEAR) {
                softmax.scale_log2 = parameter_anew(p.scale_log2);
                mask();
            } else if constexpr (SCORE::TILTS) {
                const At at = place(0);
                change_score(sequence_of(at.batch), at);
                mask();
            } else {
                apply_score(rS, 0, masked, NoTiles());
            }
            softmax.exponentiate(rS);
            take_p();
        };
        // Where P came out too large, m moves by what their sum says, or if that is far too large, by scores computed once more.
        // `l` is what had been summed up before. O must follow m.
        auto correct = [&](const float (&l)[1][2]) {
            bool again[1][2];
            softmax.shift(rS, limits, again);
            // Without the mask that is not needed ptxas spills more of wide O; with scores it takes less time to compile.
            const Masked masked = SCORE::LINEAR ? Masked{true, true} : masked_left();
            if (__any_sync(0xffffffff, again[0][0] || again[0][1]))
                exponentiate_again<T, QTile, KTile>(
                    softmax, rS, again, l, sQ + ring_q.slot(round) * QO_BYTES, warp_row(), sK + ring_k.slot(n) * KTile::bytes,
                    [&](auto& rS, int column) { apply_score(rS, column, masked, NoTiles()); });
            if constexpr (SCORE::CURVES) limits.follow(softmax, score.curve(p.scale_log2).end);
        };
        // Whether tilts rise by so much from one tile of keys to the next that S would be computed again: looked at in the
        // warpgroup's first row. Beside wide O, a tile of fewer keys and no registers to spare, it costs more than it saves.
        auto climbs = [&] {
            if constexpr (SCORE::TILTS && !SCORE::BEHIND && HEAD_DIM_V <= 64) {
                At at = place(0);
                at.row = at.row / 64 * 64;
                const Sequence sequence = sequence_of(at.batch);
                const Pair pair{sequence, at.batch, at.head_of(at.row), min(at.query_of(at.row), sequence.seq_q - 1),
                                next_key_tile() * BN};
                const int pieces = score.pieces(sequence, pair.query, pair.query, pair.key, pair.key);
                return uniform(score.step(pair, pieces) * -BN > STEEP_LOG2) != 0;
            }
            return false;
        };
        // Whether the next keys are on several pieces of a tilt.
        auto turns_ahead = [&] {
            if constexpr (TURNS_CHECKED) {
                At at = place(0);
                at.key = next_key_tile() * BN;
                const auto sequence = sequence_of(at.batch);
                return uniform(tilt.settled ? 1 : tilt.template pieces_of<BN, TILT_ROWS>(score, sequence, at, at.key)) == 0;
            }
            return false;
        };
        // Whether m may have to move a long way at the keys after the present ones: some rows have seen none. Of two loops, the
        // first ends where all have; with a map, they take turns.
        auto needs_maxima = [&] {
            if constexpr (SCORE::BLOCKS)
                return !UNCHECKED || uniform(ahead.is_partial() || SCORE::masked(keys, next_key_tile()).right) || turns_ahead();
            else
                return !UNCHECKED || (SCORE::RIGHT_EDGE && j > keys.whole_end) || climbs() || turns_ahead();
        };

        // Takes up the next tile, if there is one.
        auto take_up = [&] {
            if constexpr (ACROSS) ++round;
            ring_q.wait(round);
            const volatile WorkOfTile& work = sWork[round % WORK_STAGES];
            if constexpr (SKIPS && SCORE::LEFT_EDGE) {  // what the others visited of the tile before
                for (int first = keys.first; round > 0 && first > uniform(sWork[(round - 1) % WORK_STAGES].first()); --first)
                    turns.wait(), turns.pass(), ring_k.pass_over(n++);
            }
            j = uniform(work.end()) - 1;
            more = j >= 0;
            keys.first = FIRST ? uniform(work.keys[part].first) : 0;
            keys.whole_first = SCORE::LEFT_EDGE ? uniform(work.keys[part].whole_first) : 0;
            keys.whole_end = uniform(work.keys[part].whole_end);
            if constexpr (SKIPS) {
                for (const int end = uniform(work.keys[part].end); j >= end; --j, ++n) {
                    turns.wait(), turns.pass();
                    ring_k.pass_over(n);
                }
            }
            j_begin = j;
            if (more) look_up(), look_ahead();
            if constexpr (SCORE::TILTS) tilt = {};
            if constexpr (Pairs::BYTES) {
                if (more) begin_pairs();
            }
        };

        // Takes up a tile when none is under way.
        auto begin_tile = [&] {
            const uint32_t skipped = n;
            take_up();
            queue_s(more);
            turns.pass();
            skip_v(skipped);
            wgmma_wait<0>();
            if (more) exponentiate_checked();
        };

        float divisor[1][2];  // of O, at the end of a tile
        // Ends the sums of a tile, and begins the next one's.
        auto conclude = [&] {
            float lse[1][2];
            softmax.conclude(divisor, lse, SCORE::NEEDS_LSE || p.lse);
            if constexpr (SCORE::ENDS_ROWS) {
                const PackedRows rows = packed_rows();
#pragma unroll
                for (int h = 0; h < 2; ++h) score.end_row(divisor[0][h], lse[0][h], rows.head[h]);
            }
            if (p.lse) store_lse(lse[0], p, packed_rows());
        };
        // Writes O / l of the tile before.
        auto store = [&] {
            softmax.divide(rO, divisor);
            if constexpr (!O_FROM_REGISTERS) {
                if (KV::RAGGED && has_partial_rows()) {
                    store_o_direct<T>(rO[0], p, packed_rows());
                    // Else one thread would free the slot, and the tile's Work, while other warps still look it up.
                    if (!ALL_FREE_Q) named_barrier_sync(8 + consumer, 128);
                } else {
                    store_o_tma<T, OTile, KV::RAGGED>(rO[0], sQ + ring_q.slot(round - 1) * QO_BYTES, maps.o, p,
                                                      sWork[(round - 1) % WORK_STAGES], consumer);
                }
            } else {
                store_o_direct<T>(rO[0], p, packed_rows());
                __syncwarp();  // for the compiler: else it makes no use of what is the same in all lanes
            }
        };

        // A step of algorithm 2: S = Q K^T of the next keys and O += P V of the present ones are queued, and P of the next
        // computed under them. After a tile's last keys come the next tile's first, if its Q has a slot of its own. If FOLDED,
        // the first step of all has no present keys: what it makes of O is nothing, and goes nowhere.
        auto step = [&](auto as) {
            constexpr Form FORM = as.form;
            const bool checked = FORM != Form::UNCHECKED && (FORM != Form::EITHER || needs_maxima());
            const bool first = j == j_begin;
            const bool last = FORM == Form::FIRST || FORM == Form::NONE || (FORM == Form::CHECKED_OR_FIRST && j <= keys.first);
            const uint32_t present = n++;  // keys
            int end = BN;  // of the present tile's keys, where some may be none
            if constexpr (KV::TAILS)
                if (first && static_cast<int>(round) >= 0) end = sWork[round % WORK_STAGES].sequence.seq_kv - key_tile() * BN;
            if (first && last) free_q();
            if (!last)
                --j, visit = ahead;
            else if constexpr (ACROSS)
                take_up();
            else
                ++round;
            if constexpr (FORM != Form::NONE)
                queue_s(!last || more);
            else
                turns.wait();
            const bool begun = !FOLDED || !last || round > 0;
            queue_o(present, begun, first, end);
            turns.pass();
            if (!last) look_ahead();
            if (first && !last) free_q();

            const float l[1][2] = {{softmax.l[0][0], softmax.l[0][1]}};
            bool moved = false;
            if constexpr (FORM == Form::UNCHECKED) {
                wgmma_wait<O_FIRST ? 0 : 1>();
                exponentiate_unchecked([&] {
                    if constexpr (PACKS_EARLY) pack_p();
                });
            } else {
                if (last && begun) conclude();
                if constexpr (FORM != Form::NONE) {
                    wgmma_wait<1>();
                    if (last ? more : checked) {
                        moved = exponentiate_checked();
                    } else if (FORM == Form::EITHER && !last) {
                        exponentiate_unchecked([] {});
                        moved = softmax.too_large(limits);
                        if (moved) correct(l);
                        release_k();
                    }
                }
            }
            wgmma_wait<0>();
            if (begun) ring_v.release(present);
            if (last) {
                if (ACROSS) skip_v(present + 1);
                if (begun) store();
            } else if (moved) {
                softmax.rescale(rO);
            }
            if constexpr (FORM == Form::FIRST || FORM == Form::NONE) return;  // P is packed where the tile begins
            if (!(FORM == Form::UNCHECKED && PACKS_EARLY)) pack_p();
            if constexpr (FORM == Form::UNCHECKED) {  // the check comes after P is packed: it runs under the exponentials
                if (softmax.too_large(limits)) {
                    correct(l);
                    softmax.rescale(rO);
                    pack_p();
                }
                release_k();
            }
        };
        // Steps between a tile's first keys and its last; if FOLDED, up to those that need row maxima.
        auto steps = [&] {
            if constexpr (ONE_LOOP) {
                while (j > keys.first) step(As<Form::EITHER>());
            } else if constexpr (!UNCHECKED) {
                while (j > keys.first) step(As<Form::CHECKED>());
            } else {
                do {
                    if (FOLDED && j > keys.first && needs_maxima()) return;
                    if constexpr (!FOLDED) {
                        while (j > keys.first && needs_maxima()) step(As<Form::CHECKED>());
                    }
                    while (j > keys.first && !(SCORE::BLOCKS ? needs_maxima() : turns_ahead())) step(As<Form::UNCHECKED>());
                } while (SCORE::BLOCKS && !FOLDED && j > keys.first);
            }
        };

        if constexpr (ACROSS && !FOLDED) begin_tile();
        while (true) {
            if constexpr (!ACROSS) begin_tile();
            if constexpr (FOLDED) step(As<Form::CHECKED_OR_FIRST>());
            if (!more) break;
            if constexpr (!FOLDED) pack_p();
            steps();
            if constexpr (!FOLDED) step(As<ACROSS ? Form::FIRST : Form::NONE>());
        }
        tma_store_wait_read();
    }
}

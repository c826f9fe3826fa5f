// Clears the rows of packed arrays that no sequence has: 0, and -inf in the log-sum-exp.
#include "ptx.cuh"

constexpr int WARPS = 4;

// cufa/specs/clear_rows.py holds the same layout as a NumPy dtype.
struct ClearRowsParams {
    void* out;              // (rows, row_words), of 16 bits; null where it is not written
    float* lse;             // (heads, rows); null where there is none
    const int* cu_seqlens;  // (sequences + 1,)
    const int* used;        // (sequences,): how many of their rows count; null for all
    long long row_words;
    int rows, heads, sequences, max_seqlen;
};

// Whether a sequence has the row: the last one that begins at it or before.
__device__ inline bool has_owner(const ClearRowsParams& p, int row) {
    int batch = 0;
    for (int more = p.sequences - 1; batch < more;) {
        const int middle = batch + (more - batch + 1) / 2;
        if (p.cu_seqlens[middle] <= row)
            batch = middle;
        else
            more = middle - 1;
    }
    const int first = p.cu_seqlens[batch];
    const int most = p.used ? min(p.used[batch], p.max_seqlen) : p.max_seqlen;
    return row >= first && row < p.cu_seqlens[batch + 1] && row - first < most;
}

// A block looks at 32 rows, a lane each. Its threads share a row that is cleared, VEC words at
// once.
template <int VEC>
__global__ void __launch_bounds__(WARPS * 32)
    clear_rows(const __grid_constant__ ClearRowsParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int first_row = block_index() * 32, thread = thread_index(), lane = thread % 32;
    const bool is_row = lane < p.rows - first_row;
    uint32_t left = __ballot_sync(0xffffffff, is_row && !has_owner(p, first_row + lane));
    for (; left; left &= left - 1) {
        const long long row = first_row + __ffs(left) - 1;
        for (long long i = thread * VEC; p.out && i < p.row_words; i += WARPS * 32 * VEC) {
            unsigned short* words = static_cast<unsigned short*>(p.out) + row * p.row_words + i;
            if constexpr (VEC == 8)
                *reinterpret_cast<uint4*>(words) = make_uint4(0, 0, 0, 0);
            else
                *words = 0;
        }
        for (int head = thread; p.lse && head < p.heads; head += WARPS * 32)
            p.lse[static_cast<long long>(head) * p.rows + row] = -INF;
    }
}

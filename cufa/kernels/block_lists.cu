// Which tiles of keys each tile of rows of attention visits, from the kinds of a mask's own tiles:
// block_mask.cu says what these are, and blocks.cuh, at Visits, what is written.
#include "ptx.cuh"

// cufa/specs/block_lists.py holds the same layout as a NumPy dtype.
struct BlockListsParams {
    const unsigned char* kinds;  // (heads, kind_rows, kind_columns)
    int* lists;                  // (heads, rows, 2 (columns + 1))
    int kind_rows, kind_columns, queries, keys;
    int rows, columns, bm, bn;
    int lines, seq_q, seq_kv;  // lines = heads * rows
};

// A thread writes a line.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) block_lists(const __grid_constant__ BlockListsParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int line = block_index() * THREADS + thread_index();
    if (line >= p.lines) return;
    const int q0 = line % p.rows * p.bm;
    const int first_row = q0 / p.queries, end_row = (min(q0 + p.bm, p.seq_q) - 1) / p.queries + 1;
    const unsigned char* kinds =
        p.kinds + line / p.rows * static_cast<long long>(p.kind_rows) * p.kind_columns;
    int* before = p.lists + line * 2ll * (p.columns + 1);
    int* visited = before + p.columns + 1;
    int count = 0;
    for (int tile = 0; tile < p.columns; ++tile) {
        const int key = tile * p.bn, end_column = (min(key + p.bn, p.seq_kv) - 1) / p.keys + 1;
        bool some = false, all = true;
        for (int row = first_row; row < end_row; ++row)
            for (int column = key / p.keys; column < end_column; ++column) {
                const int kind = kinds[static_cast<long long>(row) * p.kind_columns + column];
                some |= kind > 0, all &= kind == 2;
            }
        before[tile] = count;
        if (some) visited[count++] = 2 * tile + !all;
    }
    before[p.columns] = count;
    for (; count <= p.columns; ++count) visited[count] = 2 * p.columns;
}

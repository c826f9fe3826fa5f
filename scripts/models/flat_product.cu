// y = x W^T for few rows of x.
#include "flat.cuh"

// W (outputs, inputs) with a bias or null, x (rows, inputs), y (rows, outputs, or half as many with a gate). A block has
// TILES of the outputs and GROUPS of the rows; those that have the same outputs follow each other. A multiprocessor has
// room for BLOCKS.
template <class T, class U, int GROUPS, Finish FINISH, int WARPS, int TILES, int LINES, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
flat_product(const T* weight, const float* bias, const T* x, U* y, int outputs, int inputs, int all_rows) {
    constexpr int BLOCK_ROWS = GROUPS * ROWS;
    let_next_begin();
    const int blocks_of_rows = (all_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int first = blockIdx.x / blocks_of_rows * TILES * TILE_ENDS<FINISH>;
    const int first_row = blockIdx.x % blocks_of_rows * BLOCK_ROWS, rows = min(all_rows - first_row, BLOCK_ROWS);
    const int ends = GATES<FINISH> ? outputs / 2 : outputs;
    x += static_cast<long long>(first_row) * inputs;
    flat_block<T, U, GROUPS, FINISH, WARPS, TILES, LINES>(
        weight, bias,
        [=](int group, int i) {
            const T* of_group = x + static_cast<long long>(group) * inputs + i;
            return [=](int row) { return of_group + static_cast<long long>(row) * inputs; };
        },
        [=](int row) { return y + static_cast<long long>(first_row + row) * ends; }, outputs, inputs, first, rows, false);
}

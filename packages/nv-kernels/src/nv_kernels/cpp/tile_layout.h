// A bf16 weight [N, K] as tiles of 16 outputs by 32 columns, [N / 16, K / 32, 16, 16, 2]: a row of a tile
// has two columns of each output, as the instructions for pairs of bf16 read them.
#pragma once
#include "linear.h"

constexpr int64_t TILE_OUTPUTS = 16, TILE_COLUMNS = 32, TILE_ROWS = 16;
constexpr int64_t TILE_SIZE = TILE_OUTPUTS * TILE_COLUMNS;

// 16 outputs of a row; bias may be null.
template <typename O>
inline void put_row(Vec sums, const bf16* bias, O* out) {
    if (bias) sums += load(bias);
    store(out, sums);
}

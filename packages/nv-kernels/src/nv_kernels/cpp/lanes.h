// Tiles multiplied by vectors of AVX-512 with pairs of bf16 (VDPBF16PS): an output per lane.
//
// The time of few rows is that of reading weights. Several tiles at a time are as many streams for the
// processor's own prefetcher: up to 6 rows read four of them up to 1.3 times as fast as two with
// prefetches of ours, which more than 12 rows need (one core of an AMD EPYC 9004).
#pragma once
#include "tile_layout.h"

#if defined(__AVX512BF16__)

constexpr int MOST_ROWS = 12;  // that multiply at once, by two tiles: 24 of 32 registers hold sums
constexpr int MOST_WIDE_ROWS = 6;  // the same by four tiles

// NUM_ROWS rows by TILES tiles of outputs. FETCH: the weights that come next are prefetched.
template <int NUM_ROWS, int TILES, bool FETCH = false, typename O>
inline void multiply_lanes(const Product<bf16, O>& p, int64_t m, int64_t n) {
    constexpr int64_t AHEAD = 6 * TILE_SIZE;
    const int64_t size = p.num_columns;
    const bf16 *x = p.x + m * size, *w = p.w + n * size;
    __m512 sums[NUM_ROWS][TILES];
    for (auto& row : sums)
        for (auto& each : row) each = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 2, w += 2 * TILE_OUTPUTS) {
        __m512bh weights[TILES];
        for (int t = 0; t < TILES; t++) {
            std::memcpy(&weights[t], w + t * TILE_OUTPUTS * size, sizeof weights[t]);
            if (FETCH) __builtin_prefetch(w + t * TILE_OUTPUTS * size + AHEAD);
        }
        for (int i = 0; i < NUM_ROWS; i++) {
            int32_t pair;
            std::memcpy(&pair, x + i * size + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int t = 0; t < TILES; t++)
                sums[i][t] = _mm512_dpbf16_ps(sums[i][t], both, weights[t]);
        }
    }
    for (int t = 0; t < TILES; t++) {
        int64_t at = n + t * TILE_OUTPUTS;
        for (int i = 0; i < NUM_ROWS; i++)
            put_row((Vec)sums[i][t], p.bias ? p.bias + at : nullptr,
                    p.out + (m + i) * p.num_outputs + at);
    }
}

// NUM_ROWS rows from m on by outputs n to end, whole tiles. A last tile alone, which few weights have,
// is multiplied row by row.
template <int NUM_ROWS, typename O>
inline void multiply_fixed_rows(const Product<bf16, O>& p, int64_t m, int64_t n, int64_t end) {
    if constexpr (NUM_ROWS <= MOST_WIDE_ROWS)
        for (; end - n >= 4 * TILE_OUTPUTS; n += 4 * TILE_OUTPUTS)
            multiply_lanes<NUM_ROWS, 4>(p, m, n);
    for (; end - n >= 2 * TILE_OUTPUTS; n += 2 * TILE_OUTPUTS)
        multiply_lanes<NUM_ROWS, 2>(p, m, n);
    if (n < end)
        for (int i = 0; i < NUM_ROWS; i++) multiply_lanes<1, 1>(p, m + i, n);
}

// The same with a number of rows that is not a constant, at most NUM_ROWS.
template <int NUM_ROWS, typename O>
inline void multiply_few_rows(const Product<bf16, O>& p, int64_t m, int64_t num_rows, int64_t n,
                              int64_t end) {
    if (num_rows == NUM_ROWS) return multiply_fixed_rows<NUM_ROWS>(p, m, n, end);
    if constexpr (NUM_ROWS > 1) multiply_few_rows<NUM_ROWS - 1>(p, m, num_rows, n, end);
}

// More than MOST_ROWS rows by outputs n to end, at most two tiles: the first rows bring the weights to
// the L2 cache, where the others find them.
template <typename O>
inline void multiply_many_rows(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n,
                               int64_t end) {
    if (end - n == 2 * TILE_OUTPUTS)
        multiply_lanes<MOST_ROWS, 2, true>(p, first, n);
    else
        multiply_fixed_rows<MOST_ROWS>(p, first, n, end);
    for (int64_t m = first + MOST_ROWS; m < last; m += MOST_ROWS)
        multiply_few_rows<MOST_ROWS>(p, m, std::min<int64_t>(MOST_ROWS, last - m), n, end);
}

// Outputs n to end, whole tiles, of rows first to last.
template <typename O>
inline void lane_tiles(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n,
                       int64_t end) {
    constexpr int64_t STEP = 2 * TILE_OUTPUTS;
    if (last - first <= MOST_ROWS)
        return multiply_few_rows<MOST_ROWS>(p, first, last - first, n, end);
    for (; n < end; n += STEP) multiply_many_rows(p, first, last, n, std::min(n + STEP, end));
}

#else

template <typename O>
inline void lane_tiles(const Product<bf16, O>&, int64_t, int64_t, int64_t, int64_t) {}

#endif

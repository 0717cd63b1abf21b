// Tiles multiplied by vectors of AVX-512 with pairs of bf16 (VDPBF16PS): an output per lane.
#pragma once
#include "tile_layout.h"

#if defined(__AVX512BF16__)

// NUM_ROWS rows by one or two (WIDE) tiles of outputs. FETCH: weights come from memory, and the next
// ones are prefetched.
template <int NUM_ROWS, bool WIDE, bool FETCH, typename O>
inline void multiply_lanes(const Product<bf16, O>& p, int64_t m, int64_t n) {
    constexpr int TILES = WIDE ? 2 : 1;
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

// One or two (WIDE) tiles of outputs from n on, of rows first to last.
template <bool WIDE, typename O>
inline void lane_tiles(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n) {
    int64_t m = first;
    if (last - m >= 12) multiply_lanes<12, WIDE, true>(p, m, n), m += 12;
    for (; last - m >= 12; m += 12) multiply_lanes<12, WIDE, false>(p, m, n);
    for (; last - m >= 4; m += 4) multiply_lanes<4, WIDE, true>(p, m, n);
    switch (last - m) {
        case 3: return multiply_lanes<3, WIDE, true>(p, m, n);
        case 2: return multiply_lanes<2, WIDE, true>(p, m, n);
        case 1: return multiply_lanes<1, WIDE, true>(p, m, n);
    }
}

#else

template <bool WIDE, typename O>
inline void lane_tiles(const Product<bf16, O>&, int64_t, int64_t, int64_t) {}

#endif

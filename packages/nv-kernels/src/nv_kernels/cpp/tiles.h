// bf16 products by a weight of tiles, as tile_layout.h has them. The order of a row's sums does not
// depend on the other rows.
#pragma once
#include <algorithm>

#include "amx.h"
#include "lanes.h"

// Whether this process may use AMX.
inline bool has_amx() {
    static const bool permitted = may_use_amx();
    return permitted;
}

#if defined(__AVX512BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int64_t PAIR = 2 * TILE_OUTPUTS;
constexpr int64_t TILED_ROWS = 256;  // rows that stay in the L2 cache

inline int64_t tile_pairs_of(int64_t num_outputs) { return (num_outputs + PAIR - 1) / PAIR; }

// Outputs n to end, whole tiles, of rows first to last; the thread calls `release_tiles` afterwards.
template <typename O>
inline void some_tiles(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n,
                       int64_t end) {
    if (!has_amx()) return lane_tiles(p, first, last, n, end);
    for (; end - n >= PAIR; n += PAIR) amx_tiles<true>(p, first, last, n);
    if (n < end) amx_tiles<false>(p, first, last, n);
}

inline void release_tiles() {
    if (has_amx()) release_amx();
}

// Rows by a weight of tiles; N a multiple of 16, K of 32. Each thread has its part of the outputs.
template <typename O>
inline void linear_tiles(const Product<bf16, O>& p, int64_t num_rows, int threads) {
    int64_t num_pairs = tile_pairs_of(p.num_outputs);
    for (int64_t first = 0; first < num_rows; first += TILED_ROWS) {
        int64_t last = std::min(first + TILED_ROWS, num_rows);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t part = 0; part < threads; part++) {
                int64_t begin = num_pairs * part / threads * PAIR;
                int64_t end = num_pairs * (part + 1) / threads * PAIR;
                some_tiles(p, first, last, begin, std::min(end, p.num_outputs));
            }
            release_tiles();
        }
    }
}

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

// A pair of tiles of outputs, of rows first to last; the thread calls `release_tiles` afterwards.
template <typename O>
inline void tile_pair(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t pair) {
    int64_t n = pair * PAIR;
    bool is_wide = n + PAIR <= p.num_outputs;
    if (has_amx())
        is_wide ? amx_tiles<true>(p, first, last, n) : amx_tiles<false>(p, first, last, n);
    else
        is_wide ? lane_tiles<true>(p, first, last, n) : lane_tiles<false>(p, first, last, n);
}

inline void release_tiles() {
    if (has_amx()) release_amx();
}

// Rows by a weight of tiles; N a multiple of 16, K of 32.
template <typename O>
inline void linear_tiles(const Product<bf16, O>& p, int64_t num_rows, int threads) {
    int64_t num_pairs = tile_pairs_of(p.num_outputs);
    for (int64_t first = 0; first < num_rows; first += TILED_ROWS) {
        int64_t last = std::min(first + TILED_ROWS, num_rows);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t pair = 0; pair < num_pairs; pair++) tile_pair(p, first, last, pair);
            release_tiles();
        }
    }
}

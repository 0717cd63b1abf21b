// bf16 products on a processor with matrix tiles (Intel AMX: TDPBF16PS).
//
// A weight [N, K] is stored as tiles of 16 outputs by 32 columns, [N / 16, K / 32, 16, 16, 2]: a row of
// a tile has two columns of each output, as the instruction reads them. The order of a row's sums does
// not depend on the other rows.
#pragma once
#include <algorithm>

#include "linear.h"

constexpr int64_t TILE_OUTPUTS = 16, TILE_COLUMNS = 32, TILE_ROWS = 16;
constexpr int64_t TILE_SIZE = TILE_OUTPUTS * TILE_COLUMNS;

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Ask the system for permission to use the tiles, which each process needs.
inline bool may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t num_rows) {
        bytes[tile] = 64;
        rows[tile] = uint8_t(num_rows);
    }
};

// Tiles 0 to 3 hold sums, two tiles of rows by two tiles of outputs; 4 and 5 hold rows of x; 6 and 7
// hold weights.
inline void shape_tiles(int64_t first_rows, int64_t second_rows) {
    TileShapes shapes;
    shapes.set(0, first_rows), shapes.set(1, first_rows), shapes.set(4, first_rows);
    if (second_rows)
        shapes.set(2, second_rows), shapes.set(3, second_rows), shapes.set(5, second_rows);
    shapes.set(6, TILE_COLUMNS / 2), shapes.set(7, TILE_COLUMNS / 2);
    _tile_loadconfig(&shapes);
}

template <typename O>
inline void put_tile(const float* sums, int64_t num_rows, const bf16* bias, O* out,
                     int64_t stride) {
    for (int64_t row = 0; row < num_rows; row++) {
        Vec v = load(sums + row * TILE_OUTPUTS);
        if (bias) v += load(bias);
        store(out + row * stride, v);
    }
}

// One or two tiles of rows (SECOND) by one or two tiles of outputs (WIDE). FETCH: weights come from
// memory, and the next ones are prefetched.
template <bool SECOND, bool WIDE, bool FETCH, typename O>
inline void multiply_tiles(const Product<bf16, O>& p, int64_t m, int64_t n, int64_t first_rows,
                           int64_t second_rows) {
    constexpr int64_t AHEAD = 6 * TILE_SIZE;
    const int64_t size = p.num_columns, steps = size / TILE_COLUMNS, stride = size * 2;
    const bf16 *x0 = p.x + m * size, *x1 = x0 + TILE_ROWS * size;
    const bf16 *w0 = p.w + n * size, *w1 = w0 + steps * TILE_SIZE;
    _tile_zero(0);
    if (WIDE) _tile_zero(1);
    if (SECOND) _tile_zero(2);
    if (SECOND && WIDE) _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
        if (FETCH)
            for (int line = 0; line < 16; line++) {
                __builtin_prefetch(w0 + AHEAD + line * 32);
                if (WIDE) __builtin_prefetch(w1 + AHEAD + line * 32);
            }
        _tile_loadd(6, w0, 64);
        _tile_loadd(4, x0, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (WIDE) {
            _tile_loadd(7, w1, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (SECOND) {
            _tile_loadd(5, x1, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (WIDE) _tile_dpbf16ps(3, 5, 7);
        }
        w0 += TILE_SIZE, w1 += TILE_SIZE, x0 += TILE_COLUMNS, x1 += TILE_COLUMNS;
    }
    alignas(64) float sums[TILE_ROWS * TILE_OUTPUTS];
    const bf16* bias = p.bias ? p.bias + n : nullptr;
    const bf16* next_bias = p.bias ? bias + TILE_OUTPUTS : nullptr;
    O* out = p.out + m * p.num_outputs + n;
    O* second = out + TILE_ROWS * p.num_outputs;
    _tile_stored(0, sums, 64);
    put_tile(sums, first_rows, bias, out, p.num_outputs);
    if (WIDE) {
        _tile_stored(1, sums, 64);
        put_tile(sums, first_rows, next_bias, out + TILE_OUTPUTS, p.num_outputs);
    }
    if (SECOND) {
        _tile_stored(2, sums, 64);
        put_tile(sums, second_rows, bias, second, p.num_outputs);
    }
    if (SECOND && WIDE) {
        _tile_stored(3, sums, 64);
        put_tile(sums, second_rows, next_bias, second + TILE_OUTPUTS, p.num_outputs);
    }
}

template <bool WIDE, typename O>
inline void output_tiles(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n) {
    int64_t m = first;
    if (last - first >= 2 * TILE_ROWS) {
        shape_tiles(TILE_ROWS, TILE_ROWS);
        multiply_tiles<true, WIDE, true>(p, m, n, TILE_ROWS, TILE_ROWS);
        for (m += 2 * TILE_ROWS; m + 2 * TILE_ROWS <= last; m += 2 * TILE_ROWS)
            multiply_tiles<true, WIDE, false>(p, m, n, TILE_ROWS, TILE_ROWS);
    }
    if (m == last) return;
    int64_t some = std::min(last - m, TILE_ROWS), rest = last - m - some;
    shape_tiles(some, rest);
    if (rest)
        multiply_tiles<true, WIDE, true>(p, m, n, some, rest);
    else
        multiply_tiles<false, WIDE, true>(p, m, n, some, rest);
}

constexpr int64_t TILED_ROWS = 256;  // rows that stay in the L2 cache

inline int64_t tile_pairs_of(int64_t num_outputs) { return (num_outputs / TILE_OUTPUTS + 1) / 2; }

// A pair of tiles of outputs, of rows first to last; the thread releases its tiles afterwards.
template <typename O>
inline void tile_pair(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t pair) {
    int64_t n = pair * 2 * TILE_OUTPUTS;
    if (n + 2 * TILE_OUTPUTS <= p.num_outputs)
        output_tiles<true>(p, first, last, n);
    else
        output_tiles<false>(p, first, last, n);
}

inline void release_tiles() { _tile_release(); }

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

#else

inline bool may_use_tiles() { return false; }
inline int64_t tile_pairs_of(int64_t) { return 0; }
template <typename O>
inline void tile_pair(const Product<bf16, O>&, int64_t, int64_t, int64_t) {}
inline void release_tiles() {}
template <typename O>
inline void linear_tiles(const Product<bf16, O>&, int64_t, int) {}

#endif

// Whether this process may use AMX.
inline bool use_tiles() {
    static const bool permitted = may_use_tiles();
    return permitted;
}

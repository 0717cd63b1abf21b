// Tiles multiplied by the processor's matrix tiles (Intel AMX: TDPBF16PS).
#pragma once
#include <algorithm>

#include "tile_layout.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Ask the system for permission, which each process needs.
inline bool may_use_amx() {
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
    for (int64_t row = 0; row < num_rows; row++)
        put_row(load(sums + row * TILE_OUTPUTS), bias, out + row * stride);
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

// One or two (WIDE) tiles of outputs from n on, of rows first to last; the thread calls `release_amx`
// afterwards.
template <bool WIDE, typename O>
inline void amx_tiles(const Product<bf16, O>& p, int64_t first, int64_t last, int64_t n) {
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

inline void release_amx() { _tile_release(); }

#else

inline bool may_use_amx() { return false; }
template <bool WIDE, typename O>
inline void amx_tiles(const Product<bf16, O>&, int64_t, int64_t, int64_t) {}
inline void release_amx() {}

#endif

// Many rows by a quantized weight: 32 of its rows are expanded once into tiles and multiply all rows of x.
//
// A row's bits do not depend on the other rows, but they differ from those of `quantized_tile`.
#pragma once

// Rows up to which `quantized_tile` is faster. Without AMX measured at 1 to 128 rows (two cores of an
// AMD EPYC 9004, one thread's time, layers of 576 by 1,536 in Q4_1).
inline int64_t few_rows() { return has_amx() ? 4 : 16; }

// 16 rows of 16 pairs of columns, `stride` values apart -> a tile: 16 pairs of 16 outputs.
inline void transpose(const bf16* rows, int64_t stride, bf16* tile) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // a[i + c]: in each quarter q, column 4 q + c of 4 rows
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);  // quarters 0, 2 of 8 rows
        __m512i low_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i high_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(tile + 32 * c, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(tile + 32 * (4 + c), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_storeu_si512(tile + 32 * (8 + c), _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(tile + 32 * (12 + c), _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
}

// Rows n to n + 32 -> two columns of tiles; rows past the last are 0.
inline void expand_tiles(const Quantized& by, int64_t n, bf16* rows, bf16* tiles) {
    int64_t size = by.num_columns;
    for (int64_t first = n; first < n + PAIR; first += TILE_OUTPUTS) {
        for (int64_t i = 0; i < TILE_OUTPUTS; i++) {
            by.fetch_row(first + i + TILE_OUTPUTS);
            if (first + i < by.num_outputs)
                by.expand_row(first + i, rows + i * size);
            else
                std::memset(rows + i * size, 0, size * sizeof(bf16));
        }
        for (int64_t k = 0; k < size; k += TILE_COLUMNS, tiles += TILE_SIZE)
            transpose(rows + k, size, tiles);
    }
}

// Whether tiles are faster for this number of rows of bf16.
inline bool is_worth_tiles(const Quantized& by, int64_t num_rows) {
    return !by.invariant && num_rows > few_rows() && by.num_columns % TILE_COLUMNS == 0;
}

// Outputs n to n + 32; the thread calls `release_tiles` afterwards.
template <typename T, typename O>
inline void pair_of_tiles(const Quantized& by, const bf16* x, const float* x_scale, const T* bias,
                          O* out, int64_t num_rows, int64_t n) {
    int64_t size = by.num_columns;
    float* sums = scratch<float>(BLOCK_ROWS * PAIR + (TILE_OUTPUTS + PAIR) * size / 2);
    bf16 *rows = (bf16*)(sums + BLOCK_ROWS * PAIR), *tiles = rows + TILE_OUTPUTS * size;
    expand_tiles(by, n, rows, tiles);
    some_tiles(Product<bf16, float>{x, tiles, nullptr, sums, PAIR, size}, 0, num_rows, 0, PAIR);
    finish(by, sums, PAIR, x_scale, bias, out, num_rows, n, std::min(PAIR, by.num_outputs - n));
}

template <typename T, typename O>
inline void multiply_by_tiles(const Quantized& by, const bf16* x, const float* x_scale,
                              const T* bias, O* out, int64_t num_rows, int threads) {
    int64_t num_pairs = tile_pairs_of(by.num_outputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < num_pairs; pair++)
            pair_of_tiles(by, x, x_scale, bias, out, num_rows, pair * PAIR);
        release_tiles();
    }
}

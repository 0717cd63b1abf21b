// Products by a quantized weight: a few of its rows at a time are expanded into the L1 cache and
// multiply all rows of x as `linear.h` does. So a row's bits do not depend on the others. Codes of 4 bits
// and many rows have faster ways (`code_lanes.h`, `expanded_tiles.h`).
#pragma once
#include <cmath>
#include <memory>
#include <vector>

#include "codes.h"
#include "linear.h"
#include "tiles.h"

// How x is quantized: not at all; each row by its largest, to integers or e4m3; each 128 columns of a
// row to e4m3; to e4m3 by a scale that is given.
enum Inputs : int64_t { FLOATS, ROWS_INT8, ROWS_FP8, BLOCKS_FP8, SCALED_FP8 };

// A matrix [N, K]. Row n is row index[n] of the parts, one below the other; without an index row n.
struct Quantized {
    const Rows* parts;
    const int64_t* index;
    const float* row_scale;  // [N] or null: multiplies the outputs
    int64_t num_outputs, num_columns, inputs, invariant;
    float input_scale;

    const Rows& part_of(int64_t& row) const {
        row = index ? index[row] : row;
        const Rows* part = parts;
        for (; row >= part->num_rows; part++) row -= part->num_rows;
        return *part;
    }

    template <typename T>
    void expand_row(int64_t row, T* out) const {
        const Rows& part = part_of(row);
        expand(part, row, num_columns, out);
    }

    // Begin to read row `row` into the L2 cache.
    void fetch_row(int64_t row) const {
        if (row >= num_outputs) return;
        const Rows& part = part_of(row);
        const uint8_t* first = part.codes + row * part.stride;
        int64_t size = part.row_bytes;
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(first + i, 0, 2);
    }
};

// To the nearest e4m3, ties to even, at most 448 from 0.
inline Vec to_e4m3(Vec v) {
    v = v > 448.0f ? splat(448.0f) : v;
    v = v < -448.0f ? splat(-448.0f) : v;
    Bits u = (Bits)v, sign = u & 0x80000000u;
    Vec size = (Vec)(u ^ sign);
    Bits normal = ((Bits)size + 0x7ffff + ((Bits)size >> 20 & 1)) & ~0xfffffu;
    Vec small = (size + 24576.0f) - 24576.0f;  // below 2^-6 the step is 2^-9: 2^14 * 1.5 has it
    return (Vec)((size < 0x1p-6f ? (Bits)small : normal) | sign);
}

template <typename T>
inline float largest(const T* x, int64_t size) {
    Vec most = {};
    by_vectors(size, [&](int64_t i, int count) {
        Vec v = (Vec)((Bits)load_some(x + i, count) & 0x7fffffffu);
        most = v > most ? v : most;
    });
    float result = 0.0f;
    for (int lane = 0; lane < LANES; lane++) result = std::max(result, most[lane]);
    return result;
}

// Columns of a row of x that share a scale -> their codes as numbers, which bf16 and fp32 hold exactly;
// times the scale, if the outputs are not multiplied by it. Returns the scale.
template <typename T, typename C>
inline float quantize_columns(const Quantized& by, const T* x, C* out, int64_t count) {
    float scale = by.input_scale;
    if (by.inputs != SCALED_FP8) {
        float most = largest(x, count), codes = by.inputs == ROWS_INT8 ? 127.5f : 448.0f;
        scale = most == 0.0f ? 1.0f : most / codes;
    }
    by_vectors(count, [&](int64_t i, int some) {
        Vec v = load_some(x + i, some) / scale;
        if (by.inputs == ROWS_INT8) {
            v = (v + 12582912.0f) - 12582912.0f;  // to the nearest integer
            v = v > 127.0f ? splat(127.0f) : v;
            v = v < -128.0f ? splat(-128.0f) : v;
        } else {
            v = to_e4m3(v);
        }
        store_some(out + i, by.row_scale ? v : v * scale, some);
    });
    return scale;
}

template <typename T, typename C>
inline float quantize_row(const Quantized& by, const T* x, C* out) {
    if (by.inputs != BLOCKS_FP8) return quantize_columns(by, x, out, by.num_columns);
    for (int64_t k = 0; k < by.num_columns; k += 128)
        quantize_columns(by, x + k, out + k, std::min(by.num_columns - k, int64_t(128)));
    return 1.0f;
}

// Memory of this thread, at least `count` values, aligned to a line of the cache.
template <typename T>
inline T* scratch(int64_t count) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local int64_t size = 0;
    int64_t wanted = count * int64_t(sizeof(T)) + 64;
    if (wanted > size) memory.reset(new char[wanted]), size = wanted;
    return (T*)(((uintptr_t)memory.get() + 63) / 64 * 64);
}

// Sums [num_rows, width] of rows by outputs n to n + count -> out, with scales and bias.
template <typename T, typename O>
inline void finish(const Quantized& by, const float* sums, int64_t width, const float* x_scale,
                   const T* bias, O* out, int64_t num_rows, int64_t n, int64_t count) {
    for (int64_t m = 0; m < num_rows; m++)
        by_vectors(count, [&](int64_t j, int some) {
            Vec y = load_some(sums + m * width + j, some);
            if (by.row_scale) y *= (x_scale ? x_scale[m] : 1.0f) * load_some(by.row_scale + n + j, some);
            if (bias) y += load_some(bias + n + j, some);
            store_some(out + m * by.num_outputs + n + j, y, some);
        });
}

constexpr int64_t FETCHED_ROWS = 2 * WEIGHTS;  // how far ahead rows are fetched
constexpr int64_t OUTPUTS = 8 * WEIGHTS;  // that a thread computes at a time: whole vectors of them

// Outputs n to n + count of rows of x, which are in C.
template <typename C, typename T, typename O>
inline void quantized_tile(const Quantized& by, const C* x, const float* x_scale, const T* bias,
                           O* out, int64_t num_rows, int64_t n, int64_t count) {
    int64_t size = by.num_columns;
    float* sums = scratch<float>(BLOCK_ROWS * OUTPUTS + WEIGHTS * size);
    C* values = (C*)(sums + BLOCK_ROWS * OUTPUTS);
    for (int64_t j = 0; j < count; j += WEIGHTS) {
        int64_t some = std::min(int64_t(WEIGHTS), count - j);
        for (int64_t i = 0; i < some; i++) {
            by.fetch_row(n + j + i + FETCHED_ROWS);
            by.expand_row(n + j + i, values + i * size);
        }
        Product<C, float> product{x, values, nullptr, sums + j, OUTPUTS, size};
        if (some == WEIGHTS)
            weights<Fastest<C>, WEIGHTS, 0>(product, 0, num_rows, 0);
        else
            for (int64_t i = 0; i < some; i++) weights<Fastest<C>, 1, 0>(product, 0, num_rows, i);
    }
    finish(by, sums, OUTPUTS, x_scale, bias, out, num_rows, n, count);
}

#if defined(__AVX512BF16__)
#include "expanded_tiles.h"
#include "code_lanes.h"
#endif

// x [num_rows, K] in C.
template <typename C, typename T, typename O>
inline void multiply_rows(const Quantized& by, const C* x, const float* x_scale, const T* bias,
                          O* out, int64_t num_rows, int threads) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<C, bf16> && std::is_same_v<T, bf16>) {
        if (is_worth_lanes(by, num_rows))
            return multiply_by_lanes(by, x, bias, out, num_rows, threads);
    }
    if constexpr (std::is_same_v<C, bf16>) {
        if (is_worth_tiles(by, num_rows))
            return multiply_by_tiles(by, x, x_scale, bias, out, num_rows, threads);
    }
#endif
    int64_t num_tiles = (by.num_outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < num_tiles; t++) {
        int64_t n = t * OUTPUTS, count = std::min(OUTPUTS, by.num_outputs - n);
        quantized_tile(by, x, x_scale, bias, out, num_rows, n, count);
    }
}

template <typename C, typename T, typename O>
inline void multiply_quantized(const Quantized& by, const T* x, const T* bias, O* out,
                               int64_t num_rows, int threads) {
    int64_t size = by.num_columns;
    std::unique_ptr<C[]> codes(new C[num_rows * size]);
    std::unique_ptr<float[]> scales(new float[num_rows]);
#pragma omp parallel for num_threads(threads) if (num_rows * size > WORTH_A_THREAD)
    for (int64_t m = 0; m < num_rows; m++)
        scales[m] = quantize_row(by, x + m * size, codes.get() + m * size);
    multiply_rows(by, codes.get(), scales.get(), bias, out, num_rows, threads);
}

// Codes without their scales are exact in bf16, which is multiplied faster.
template <typename T, typename O>
void linear_quantized(const Quantized& by, const T* x, const T* bias, O* out, int64_t num_rows,
                      int threads) {
    for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
        int64_t count = std::min(BLOCK_ROWS, num_rows - first);
        const T* rows = x + first * by.num_columns;
        O* into = out + first * by.num_outputs;
        if (by.inputs == FLOATS)
            multiply_rows(by, rows, nullptr, bias, into, count, threads);
        else if (by.row_scale)
            multiply_quantized<bf16>(by, rows, bias, into, count, threads);
        else
            multiply_quantized<T>(by, rows, bias, into, count, threads);
    }
}

// A norm of the residual stream and the product that reads it, in one call.
//
// Rows go through both in blocks, so that the normed rows stay in the L2 cache.
#pragma once
#include <memory>

#include "elementwise.h"
#include "linear.h"
#include "quantized.h"
#include "tiles.h"

template <typename T>
struct Matrix {
    const T* values;
    int64_t num_outputs, num_columns;
    int64_t in_tiles;
};

// x, residual: [T, E], residual may be null. If not, total = x + residual [T, E] is written.
template <typename T>
struct Normed {
    const T *x, *residual, *weight;
    float eps;
    T* total;
};

template <typename T>
void multiply(const T* x, const Matrix<T>& by, const T* bias, T* out, int64_t num_rows,
              int threads) {
    Product<T> product{x, by.values, bias, out, by.num_outputs, by.num_columns};
    if constexpr (std::is_same_v<T, bf16>) {
        if (by.in_tiles) return linear_tiles(product, num_rows, threads);
    }
    linear(product, num_rows, threads);
}

template <typename T>
void multiply(const T* x, const Quantized& by, const T* bias, T* out, int64_t num_rows,
              int threads) {
    linear_quantized(by, x, bias, out, num_rows, threads);
}

constexpr int64_t NORMED_ROWS = 256;

// Calls function(first row, number of rows, normed rows, scratch of `width` values per row).
template <typename T, typename Function>
void by_normed_blocks(const Normed<T>& in, int64_t size, int64_t width, int64_t num_tokens,
                      int threads, Function function) {
    int64_t rows = std::min(num_tokens, NORMED_ROWS);
    std::unique_ptr<T[]> memory(new T[rows * (size + width)]);
    T *normed = memory.get(), *scratch = normed + rows * size;
    for (int64_t first = 0; first < num_tokens; first += rows) {
        int64_t count = std::min(rows, num_tokens - first), at = first * size;
        add_rms_norm(in.x + at, in.residual ? in.residual + at : nullptr, in.weight, in.eps, normed,
                     in.total + at, count, size, threads);
        function(first, count, normed, scratch);
    }
}

// by: a Matrix or a Quantized -> out [T, N].
template <typename T, typename By>
void norm_linear(const By& by, const T* bias, const Normed<T>& in, T* out,
                 int64_t num_tokens, int threads) {
    by_normed_blocks(in, by.num_columns, 0, num_tokens, threads,
                     [&](int64_t first, int64_t count, const T* normed, T*) {
                         multiply(normed, by, bias, out + first * by.num_outputs, count, threads);
                     });
}

// by: gate rows, then up rows -> out = silu(gate) * up [T, N / 2].
template <typename T, typename By>
void norm_gated_linear(const By& by, const T* bias, const Normed<T>& in, T* out,
                       int64_t num_tokens, int threads) {
    int64_t width = by.num_outputs / 2;
    by_normed_blocks(in, by.num_columns, by.num_outputs, num_tokens, threads,
                     [&](int64_t first, int64_t count, const T* normed, T* gate_up) {
                         multiply(normed, by, bias, gate_up, count, threads);
                         silu_and_mul(gate_up, out + first * width, count, width, threads);
                     });
}

// A decoder layer without its attention, in two calls.
//
// Owns the order, which is `nv_kernels.linear.chain`'s. Rows go through a layer in blocks, so that what lies
// between two products stays in the second cache.
#pragma once
#include <memory>

#include "elementwise.h"
#include "linear.h"
#include "tiles.h"

template <typename T>
struct Matrix {
    const T *weight, *bias;  // bias may be null
    int64_t num_outputs, num_columns;
    int64_t in_tiles;
};

template <typename T>
struct Layer {
    const T *attention_norm, *mlp_norm;
    Matrix<T> qkv, output, gate_up, down;
    float eps;
};

template <typename T>
void multiply(const T* x, const Matrix<T>& by, T* out, int64_t num_rows, int threads) {
    Product<T> product{x, by.weight, by.bias, out, by.num_outputs, by.num_columns};
    if constexpr (std::is_same_v<T, bf16>) {
        if (by.in_tiles) return linear_tiles(product, num_rows, threads);
    }
    linear(product, num_rows, threads);
}

constexpr int64_t LAYER_ROWS = 256;

template <typename T, typename Function>
void by_blocks(int64_t num_tokens, int64_t scratch_width, Function function) {
    int64_t rows = std::min(num_tokens, LAYER_ROWS);
    std::unique_ptr<T[]> scratch(new T[rows * scratch_width]);
    for (int64_t first = 0; first < num_tokens; first += rows)
        function(first, std::min(rows, num_tokens - first), rows, scratch.get());
}

// x, residual: [T, E], residual may be null -> qkv, and total [T, E] where there is a residual.
template <typename T>
void attention_input(const Layer<T>& layer, const T* x, const T* residual, T* total, T* qkv,
                     int64_t num_tokens, int threads) {
    int64_t size = layer.qkv.num_columns;
    by_blocks<T>(num_tokens, size, [&](int64_t first, int64_t count, int64_t, T* normed) {
        int64_t at = first * size;
        add_rms_norm(x + at, residual ? residual + at : nullptr, layer.attention_norm, layer.eps,
                     normed, total + at, count, size, threads);
        multiply(normed, layer.qkv, qkv + first * layer.qkv.num_outputs, count, threads);
    });
}

// attended: [T, Hq D], hidden: [T, E] -> the stream after attention and what is still to be added.
template <typename T>
void attention_output(const Layer<T>& layer, const T* attended, const T* hidden, T* stream,
                      T* pending, int64_t num_tokens, int threads) {
    int64_t size = layer.output.num_outputs, width = layer.down.num_columns;
    int64_t scratch = 2 * size + 3 * width;
    by_blocks<T>(num_tokens, scratch, [&](int64_t first, int64_t count, int64_t rows, T* memory) {
        T *projected = memory, *normed = projected + rows * size, *gate_up = normed + rows * size;
        T* gated = gate_up + rows * 2 * width;
        multiply(attended + first * layer.output.num_columns, layer.output, projected, count,
                 threads);
        add_rms_norm(projected, hidden + first * size, layer.mlp_norm, layer.eps, normed,
                     stream + first * size, count, size, threads);
        multiply(normed, layer.gate_up, gate_up, count, threads);
        silu_and_mul(gate_up, gated, count, width, threads);
        multiply(gated, layer.down, pending + first * size, count, threads);
    });
}

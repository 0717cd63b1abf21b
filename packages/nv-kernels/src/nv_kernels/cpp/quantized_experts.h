// A mixture of experts whose matrices stay quantized: some rows of a matrix are expanded at a time, as
// `quantized.h` does, and multiply the rows of x that chose its expert.
#pragma once
#include "experts.h"
#include "quantized.h"

// gates and ups: E matrices [F, K] each; downs: E matrices [K, F]. Matrices of one kind quantize x
// alike. Biases [E, 2 F], gate then up, and [E, K] may be null.
template <typename T>
struct QuantizedExperts {
    const Quantized *gates, *ups, *downs;
    const T *gate_up_bias, *down_bias;
    int64_t num_experts, size, width;
    Gate gate;
};

constexpr int64_t SHARE = 96;  // outputs of a piece of work: whole tiles, and whole pairs of tiles
static_assert(SHARE % OUTPUTS == 0, "whole tiles");

// Outputs n to n + count of rows of x, which are in C.
template <typename C, typename T>
inline void multiply_share(const Quantized& by, const C* x, const float* x_scale, const T* bias,
                           T* out, int64_t num_rows, int64_t n, int64_t count) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<C, bf16>) {
        static_assert(SHARE % PAIR == 0, "whole pairs of tiles");
        if (is_worth_tiles(by, num_rows)) {
            for (int64_t last = n + count; n < last; n += PAIR)
                pair_of_tiles(by, x, x_scale, bias, out, num_rows, n);
            return;
        }
    }
#endif
    for (int64_t last = n + count; n < last; n += OUTPUTS)
        quantized_tile(by, x, x_scale, bias, out, num_rows, n, std::min(OUTPUTS, last - n));
}

// Rows x [n, K] in C by the matrix [N, K] of each row's expert, and its bias -> out [n, N].
template <typename C, typename T>
void multiply_in(const std::vector<ExpertRows>& groups, const C* x, const float* x_scale,
                 const Quantized* matrices, const T* biases, int64_t bias_stride, T* out,
                 int threads) {
    int64_t outputs = matrices->num_outputs, shares = (outputs + SHARE - 1) / SHARE;
    int64_t count = int64_t(groups.size()) * shares;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const ExpertRows& rows = groups[i / shares];
            const T* bias = biases ? biases + rows.expert * bias_stride : nullptr;
            int64_t n = i % shares * SHARE;
            multiply_share(matrices[rows.expert], x + rows.first * matrices->num_columns,
                           x_scale ? x_scale + rows.first : nullptr, bias,
                           out + rows.first * outputs, rows.last - rows.first, n,
                           std::min(SHARE, outputs - n));
        }
        release_tiles();
    }
}

template <typename C, typename T>
void quantize_and_multiply(const std::vector<ExpertRows>& groups, const T* x, int64_t num_rows,
                           const Quantized* matrices, const T* biases, int64_t bias_stride, T* out,
                           int threads) {
    int64_t size = matrices->num_columns;
    std::unique_ptr<C[]> codes(new C[num_rows * size]);
    std::unique_ptr<float[]> scales(new float[num_rows]);
#pragma omp parallel for num_threads(threads) if (num_rows * size > WORTH_A_THREAD)
    for (int64_t m = 0; m < num_rows; m++)
        scales[m] = quantize_row(*matrices, x + m * size, codes.get() + m * size);
    multiply_in(groups, codes.get(), scales.get(), matrices, biases, bias_stride, out, threads);
}

template <typename T>
void multiply_by_expert(const std::vector<ExpertRows>& groups, const T* x, int64_t num_rows,
                        const Quantized* matrices, const T* biases, int64_t bias_stride, T* out,
                        int threads) {
    if (matrices->inputs == FLOATS)
        multiply_in(groups, x, nullptr, matrices, biases, bias_stride, out, threads);
    else if (matrices->row_scale)  // codes without their scales are exact in bf16
        quantize_and_multiply<bf16>(groups, x, num_rows, matrices, biases, bias_stride, out,
                                    threads);
    else
        quantize_and_multiply<T>(groups, x, num_rows, matrices, biases, bias_stride, out, threads);
}

template <typename T>
void multiply_and_gate(const QuantizedExperts<T>& by, const std::vector<ExpertRows>& groups,
                       const T* x, T* products, T* gated, int64_t num_rows, int threads) {
    T* ups = products + num_rows * by.width;
    const T* up_bias = by.gate_up_bias ? by.gate_up_bias + by.width : nullptr;
    multiply_by_expert(groups, x, num_rows, by.gates, by.gate_up_bias, 2 * by.width, products,
                       threads);
    multiply_by_expert(groups, x, num_rows, by.ups, up_bias, 2 * by.width, ups, threads);
    gate_rows(by.gate, products, ups, by.width, gated, num_rows, by.width, threads);
}

template <typename T>
void multiply_by_last(const QuantizedExperts<T>& by, const std::vector<ExpertRows>& groups,
                      const T* gated, T* out, int64_t num_rows, int threads) {
    multiply_by_expert(groups, gated, num_rows, by.downs, by.down_bias, by.size, out, threads);
}

// A mixture of experts: the choice of each token's experts, and their gated MLPs.
//
// Rows are sorted by expert, so that an expert's weights are read once for a block of tokens. Every
// row is multiplied alone and a token's experts are added in order, so that its bits do not depend on
// the other tokens. Rounds where `nv_kernels.reference` rounds.
#pragma once
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "linear.h"
#include "tiles.h"

// logits [T, E] -> the k experts of each token, of equal logits the lower id first, and their weights
// [T, k].
template <typename T>
void route(const T* logits, int32_t* chosen, T* weights, int64_t num_tokens, int64_t num_experts,
           int64_t top_k, bool normalised, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * num_experts > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++) {
        const T* row = logits + t * num_experts;
        std::vector<bool> is_taken(num_experts);
        std::vector<float> values(top_k);
        for (int64_t j = 0; j < top_k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < num_experts; e++)
                if (!is_taken[e] && (best < 0 || as_float(row[e]) > as_float(row[best]))) best = e;
            is_taken[best] = true;
            chosen[t * top_k + j] = int32_t(best);
        }
        float most = as_float(row[chosen[t * top_k]]), total = 0.0f;
        by_vectors(num_experts, [&](int64_t i, int count) {
            float exps[LANES];
            store(exps, exponential(load_some(row + i, count) - most));
            for (int lane = 0; lane < count; lane++) total += exps[lane];
        });
        float kept = 0.0f;
        for (int64_t j = 0; j < top_k; j++) {
            float above = as_float(row[chosen[t * top_k + j]]) - most;
            values[j] = exponential(splat(above))[0] / total;
            kept += values[j];
        }
        for (int64_t j = 0; j < top_k; j++)
            put(weights + t * top_k + j, normalised ? values[j] / kept : values[j]);
    }
}

// g sigmoid(alpha g) (u + shift), g at most `limit` and u at most that far from 0.
struct Gate {
    float alpha, limit, shift;
};

// gate_up [E, 2 F, K], gate rows then up rows; down [E, K, F]; K is `size`, F is `width`. In tiles, each
// expert's matrix is laid out as tile_layout.h has it. Biases [E, 2 F] and [E, K] may be null.
template <typename T>
struct Experts {
    const T *gate_up, *down, *gate_up_bias, *down_bias;
    int64_t num_experts, size, width;
    int64_t in_tiles;
    Gate gate;
};

// Some rows that one expert multiplies.
struct ExpertRows {
    int64_t expert, first, last;
};

// Rows of gate and of up, `stride` values apart -> out [n, F]. A NaN stays NaN.
template <typename T>
void gate_rows(const Gate& by, const T* gates, const T* ups, int64_t stride, T* out,
               int64_t num_rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (num_rows * width > WORTH_A_THREAD)
    for (int64_t row = 0; row < num_rows; row++) {
        const T *gate = gates + row * stride, *up = ups + row * stride;
        Vec limit = splat(by.limit);
        by_vectors(width, [&](int64_t i, int count) {
            Vec g = load_some(gate + i, count), u = load_some(up + i, count);
            g = g > limit ? limit : g;
            u = u > limit ? limit : u;
            u = u < -limit ? -limit : u;
            Vec activated = rounded(g / (1.0f + exponential(-by.alpha * g)), gate);
            store_some(out + row * width + i, activated * (u + by.shift), count);
        });
    }
}

// Rows x [n, K] by the matrix [N, K] of each row's expert, and its bias [N] -> out [n, N].
template <typename T>
void multiply_by_expert(const std::vector<ExpertRows>& groups, const T* x, const T* matrices,
                        const T* biases, T* out, int64_t num_outputs, int64_t num_columns,
                        bool in_tiles, int threads) {
    constexpr int64_t SHARE_OF_TILES = 2 * PAIR;  // outputs of a piece of work
    int64_t shares = (num_outputs + SHARE_OF_TILES - 1) / SHARE_OF_TILES;
    int64_t tiles = in_tiles ? shares : linear_tiles_of(num_outputs);
    int64_t count = int64_t(groups.size()) * tiles;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < count; i++) {
            const ExpertRows& rows = groups[i / tiles];
            const T* matrix = matrices + rows.expert * num_outputs * num_columns;
            const T* bias = biases ? biases + rows.expert * num_outputs : nullptr;
            Product<T> product{x, matrix, bias, out, num_outputs, num_columns};
            if constexpr (std::is_same_v<T, bf16>) {
                if (in_tiles) {
                    int64_t n = i % tiles * SHARE_OF_TILES;
                    some_tiles(product, rows.first, rows.last, n,
                               std::min(n + SHARE_OF_TILES, num_outputs));
                    continue;
                }
            }
            linear_tile<Fastest<T>>(product, rows.first, rows.last, i % tiles);
        }
        if (in_tiles) release_tiles();
    }
}

// Rows x [n, K] -> gated [n, F]; `products` has room for [n, 2 F].
template <typename T>
void multiply_and_gate(const Experts<T>& by, const std::vector<ExpertRows>& groups, const T* x,
                       T* products, T* gated, int64_t num_rows, int threads) {
    multiply_by_expert(groups, x, by.gate_up, by.gate_up_bias, products, 2 * by.width, by.size,
                       by.in_tiles, threads);
    gate_rows(by.gate, products, products + by.width, 2 * by.width, gated, num_rows, by.width,
              threads);
}

// Gated rows [n, F] -> out [n, K].
template <typename T>
void multiply_by_last(const Experts<T>& by, const std::vector<ExpertRows>& groups, const T* gated,
                      T* out, int64_t, int threads) {
    multiply_by_expert(groups, gated, by.down, by.down_bias, out, by.size, by.width, by.in_tiles,
                       threads);
}

// Sort a block's entries by expert: entry t * k + j goes to row `row_of[entry]`.
inline std::vector<ExpertRows> sort_by_expert(const int32_t* chosen, int64_t num_entries,
                                              int64_t num_experts, std::vector<int64_t>& row_of) {
    std::vector<int64_t> next(num_experts + 1);
    for (int64_t i = 0; i < num_entries; i++) next[chosen[i] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) next[e + 1] += next[e];
    std::vector<ExpertRows> groups;
    for (int64_t e = 0; e < num_experts; e++)
        for (int64_t first = next[e]; first < next[e + 1]; first += BLOCK_ROWS)
            groups.push_back({e, first, std::min(first + BLOCK_ROWS, next[e + 1])});
    row_of.resize(num_entries);
    for (int64_t i = 0; i < num_entries; i++) row_of[i] = next[chosen[i]]++;
    return groups;
}

// One block of tokens; see `experts`.
template <typename T, typename By>
void experts_of_block(const By& by, const T* x, const int32_t* chosen, const T* weights,
                      T* out, int64_t num_tokens, int64_t top_k, int threads) {
    int64_t entries = num_tokens * top_k, size = by.size, width = by.width;
    std::vector<int64_t> row_of;
    auto groups = sort_by_expert(chosen, entries, by.num_experts, row_of);
    std::unique_ptr<T[]> memory(new T[entries * (2 * size + 3 * width)]);
    T *rows = memory.get(), *products = rows + entries * size;
    T *gate_up = products + entries * size, *gated = gate_up + entries * 2 * width;
    for (int64_t i = 0; i < entries; i++)
        std::memcpy(rows + row_of[i] * size, x + i / top_k * size, size * sizeof(T));
    multiply_and_gate(by, groups, rows, gate_up, gated, entries, threads);
    multiply_by_last(by, groups, gated, products, entries, threads);
#pragma omp parallel for num_threads(threads) if (entries * size > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++)
        by_vectors(size, [&](int64_t i, int count) {
            Vec total = {};
            for (int64_t j = t * top_k; j < (t + 1) * top_k; j++) {
                Vec product = load_some(products + row_of[j] * size + i, count);
                total += rounded(product * as_float(weights[j]), x);
            }
            store_some(out + t * size + i, total, count);
        });
}

// x [T, K] -> out [T, K]: the sum over j of weights[t, j] times the MLP of expert chosen[t, j]. by: an
// Experts, or a QuantizedExperts.
template <typename T, typename By>
void experts(const By& by, const T* x, const int32_t* chosen, const T* weights, T* out,
             int64_t num_tokens, int64_t top_k, int threads) {
    constexpr int64_t BLOCK = 512;  // tokens, which bounds the memory of their rows
    for (int64_t first = 0; first < num_tokens; first += BLOCK) {
        int64_t count = std::min(BLOCK, num_tokens - first), entry = first * top_k;
        experts_of_block(by, x + first * by.size, chosen + entry, weights + entry,
                         out + first * by.size, count, top_k, threads);
    }
}

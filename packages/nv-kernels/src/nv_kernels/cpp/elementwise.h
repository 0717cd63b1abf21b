// The small ops of a layer: add and norm, gate, q/k norm with rope and the cache write.
//
// Each op rounds where `nv_kernels.reference` rounds. Each token is computed alone, in order of its
// elements.
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

constexpr int64_t WORTH_A_THREAD = 1 << 14;  // elements; with fewer per thread, waking it costs more

// 1 / root mean square of `size` elements.
template <typename T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vec v = load(x + i);
        squares = multiply_add(v, v, squares);
    }
    float total = sum(squares);
    for (; i < size; i++) total = multiply_add(as_float(x[i]), as_float(x[i]), total);
    return 1.0f / __builtin_sqrtf(total / float(size) + eps);
}

// Apply `function` to vectors of LANES elements from i on; the last, shorter one goes through `pad`.
template <typename Function>
inline void by_vectors(int64_t size, Function function) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) function(i, LANES);
    if (i < size) function(i, int(size - i));
}

template <typename T>
inline Vec load_some(const T* p, int count) {
    if (count == LANES) return load(p);
    T padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <typename T>
inline void store_some(T* p, Vec v, int count) {
    if (count == LANES) return store(p, v);
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, count * sizeof(T));
}

// normed, total: [T, E]; residual may be null, and then total is x itself.
template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, T* normed, T* total,
                  int64_t num_tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (num_tokens * size > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++) {
        const T* row = x + t * size;
        if (residual) {
            const T *left = row, *right = residual + t * size;
            T* out = total + t * size;
            by_vectors(size, [&](int64_t i, int count) {
                store_some(out + i, load_some(left + i, count) + load_some(right + i, count), count);
            });
            row = out;
        }
        float scale = inverse_rms(row, size, eps);
        by_vectors(size, [&](int64_t i, int count) {
            Vec unit = rounded(load_some(row + i, count) * scale, weight);
            store_some(normed + t * size + i, load_some(weight + i, count) * unit, count);
        });
    }
}

// x: [T, 2 F] -> out: [T, F], activation(gate) * up.
template <typename T, typename Activation>
void gate_and_mul(const T* x, T* out, int64_t num_tokens, int64_t size, int threads,
                  Activation activation) {
#pragma omp parallel for num_threads(threads) if (num_tokens * size > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++) {
        const T *gate = x + 2 * t * size, *up = gate + size;
        by_vectors(size, [&](int64_t i, int count) {
            Vec g = load_some(gate + i, count);
            Vec gated = rounded(activation(g), x);
            store_some(out + t * size + i, gated * load_some(up + i, count), count);
        });
    }
}

template <typename T>
void silu_and_mul(const T* x, T* out, int64_t num_tokens, int64_t size, int threads) {
    gate_and_mul(x, out, num_tokens, size, threads,
                 [](Vec g) { return g / (1.0f + exponential(-g)); });
}

template <typename T>
void gelu_tanh_and_mul(const T* x, T* out, int64_t num_tokens, int64_t size, int threads) {
    constexpr float scale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    gate_and_mul(x, out, num_tokens, size, threads, [](Vec g) {
        return g / (1.0f + exponential(-scale * g * (1.0f + 0.044715f * g * g)));
    });
}

// Index of each row's first highest element; -1 for a row with a NaN or infinity, or of -inf only.
template <typename T>
void greedy(const T* logits, int64_t* ids, int64_t num_rows, int64_t stride, int64_t size,
            int threads) {
#pragma omp parallel for num_threads(threads) if (num_rows * size > WORTH_A_THREAD)
    for (int64_t r = 0; r < num_rows; r++) {
        const T* row = logits + r * stride;
        Vec most = splat(-INFINITY), infinite = splat(INFINITY);
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            Vec some = load(row + i);
            some = some < infinite ? some : infinite;  // NaN counts as infinity
            most = some > most ? some : most;
        }
        float highest = most[0];
        for (int lane = 1; lane < LANES; lane++) highest = most[lane] > highest ? most[lane] : highest;
        for (; i < size; i++) {
            float one = as_float(row[i]) < INFINITY ? as_float(row[i]) : INFINITY;
            highest = one > highest ? one : highest;
        }
        ids[r] = -1;
        if (!std::isfinite(highest)) continue;
        int64_t first = 0;
        while (as_float(row[first]) != highest) first++;
        ids[r] = first;
    }
}

// One layer's keys or values: strides, in elements, of a block, of a token and of a head.
template <typename T>
struct Cache {
    T* data;
    int64_t block_stride, token_stride, head_stride;
    int64_t block_size;

    T* at(int64_t slot, int64_t head) const {
        return data + slot / block_size * block_stride + slot % block_size * token_stride +
               head * head_stride;
    }
};

// Norm (if weight is not null) one head of D elements and rotate its first `rotated` ones; cos then
// sin, rotated / 2 fp32 each.
template <typename T>
inline void turn(const T* x, const T* weight, float eps, const float* angles, T* out, int64_t dim,
                 int64_t rotated_size) {
    float scale = weight ? inverse_rms(x, dim, eps) : 1.0f;
    int64_t half = rotated_size / 2;
    auto normed = [&](int64_t i, int count) {
        Vec v = load_some(x + i, count);
        if (!weight) return v;
        return rounded(load_some(weight + i, count) * rounded(v * scale, x), x);
    };
    by_vectors(half, [&](int64_t i, int count) {
        Vec first = normed(i, count), second = normed(half + i, count);
        Vec cos = rounded(load_some(angles + i, count), x);
        Vec sin = rounded(load_some(angles + half + i, count), x);
        store_some(out + i, rounded(first * cos, x) - rounded(second * sin, x), count);
        store_some(out + half + i, rounded(second * cos, x) + rounded(first * sin, x), count);
    });
    by_vectors(dim - rotated_size, [&](int64_t i, int count) {
        store_some(out + rotated_size + i, normed(rotated_size + i, count), count);
    });
}

// Whether `first` <= each of some numbers < `end`.
inline bool all_within(const int64_t* numbers, int64_t count, int64_t first, int64_t end) {
    return std::all_of(numbers, numbers + count,
                       [&](int64_t number) { return first <= number && number < end; });
}

// x: [T, H, D] -> out, each head rotated; false, and nothing done, if a position has no angles.
template <typename T>
bool apply_rope(const T* x, const int64_t* positions, const float* cos_sin, T* out,
                int64_t num_tokens, int64_t heads, int64_t dim, int64_t num_positions,
                int64_t rotated_size, int threads) {
    if (!all_within(positions, num_tokens, 0, num_positions)) return false;
#pragma omp parallel for num_threads(threads) if (num_tokens * heads * dim > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = t * heads; h < (t + 1) * heads; h++)
            turn<T>(x + h * dim, nullptr, 0.0f, cos_sin + positions[t] * rotated_size,
                    out + h * dim, dim, rotated_size);
    return true;
}

// qkv: [T, (Hq + 2 Hkv) D] -> q: [T, Hq, D]; keys and values go to their slots, unless a slot is -1.
// False, and nothing done, if a position has no angles or the cache does not have a slot.
template <typename T>
bool qk_norm_rope_store(const T* qkv, const T* q_weight, const T* k_weight, float eps,
                        const int64_t* positions, const float* cos_sin, Cache<T> keys,
                        Cache<T> values, const int64_t* slots, T* q, int64_t num_tokens,
                        int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t num_slots,
                        int64_t num_positions, int64_t rotated_size, int threads) {
    if (!all_within(slots, num_tokens, INT64_MIN, num_slots)) return false;
    if (cos_sin && !all_within(positions, num_tokens, 0, num_positions)) return false;
    int64_t width = (q_heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (num_tokens * width > WORTH_A_THREAD)
    for (int64_t t = 0; t < num_tokens; t++) {
        const T* row = qkv + t * width;
        const float* angles = cos_sin + positions[t] * rotated_size;
        for (int64_t h = 0; h < q_heads; h++)
            turn(row + h * dim, q_weight, eps, angles, q + (t * q_heads + h) * dim, dim,
                 rotated_size);
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < kv_heads; h++) {
            const T* key = row + (q_heads + h) * dim;
            turn(key, k_weight, eps, angles, keys.at(slots[t], h), dim, rotated_size);
            std::memcpy(values.at(slots[t], h), key + kv_heads * dim, dim * sizeof(T));
        }
    }
    return true;
}

// Rows times a transposed weight. Each output is one sum in a fixed order, so that a row does not
// depend on the others.
//
// The weight is [N, K], as stored. A tile is MR rows by NR weights, with one vector of sums for each
// pair. The weights of a tile are read once per block of rows and stay in the L1 cache; while they are
// multiplied, the weights of the next tile are fetched into the L2 cache.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vectors.h"

// Sizes of a tile: with AVX-512, 24 of 32 registers hold sums, else 12 of 16.
constexpr int ROWS = 4, WEIGHTS = LANES == 16 ? 6 : 3;
constexpr int64_t BLOCK_ROWS = 128;   // rows that stay in the L2 cache

template <typename T, typename O = T>
struct Product {
    const T* x;       // [rows, K]
    const T* w;       // [N, K]
    const T* bias;    // [N] or null
    O* out;           // [rows, N]
    int64_t num_outputs, num_columns;
};

// How a tile multiplies: one element per lane.
template <typename T>
struct Singly {
    static constexpr int64_t STEP = LANES;
    static constexpr bool HAS_LOW_TILES = std::is_same_v<T, float>;  // of 2 and 3 rows
    static Vec read(const T* p) { return load(p); }
    static Vec add(Vec a, Vec b, Vec sum) { return multiply_add(a, b, sum); }
};

// Two bf16 per lane, where the processor has the instruction. Its sums differ from those of `Singly`
// in the last bits. Two rows by a weight of 3,072 by 1,024 took 0.6 of the time of `Singly`, 16 rows
// 0.3 (one core of a shared machine, in turn).
#if defined(__AVX512BF16__)
struct InPairs {
    static constexpr int64_t STEP = 2 * LANES;
    static constexpr bool HAS_LOW_TILES = false;  // see docs/kernels.md for what they cost
    static __m512bh read(const bf16* p) {
        __m512bh pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return pairs;
    }
    static Vec add(__m512bh a, __m512bh b, Vec sum) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b);
    }
};
#else
using InPairs = Singly<bf16>;
#endif

template <typename T>
using Fastest = std::conditional_t<std::is_same_v<T, bf16>, InPairs, Singly<T>>;

// Rows m to m + MR by weights n to n + NR. FETCH: vectors of the next tile's weights that are fetched
// per vector of this tile's, from `next` on.
template <typename Step, int MR, int NR, int FETCH, typename T, typename O>
inline void tile(const Product<T, O>& p, int64_t m, int64_t n, const T* next) {
    const int64_t size = p.num_columns;
    const T *x = p.x + m * size, *w = p.w + n * size;
    Vec total[MR][NR] = {};
    int64_t k = 0;
    for (; k + Step::STEP <= size; k += Step::STEP) {
        decltype(Step::read(w)) weights[NR];
        for (int j = 0; j < NR; j++) weights[j] = Step::read(w + j * size + k);
        for (int f = 0; f < FETCH; f++) __builtin_prefetch(next + f * size + k, 0, 2);
        for (int i = 0; i < MR; i++) {
            auto row = Step::read(x + i * size + k);
            for (int j = 0; j < NR; j++) total[i][j] = Step::add(row, weights[j], total[i][j]);
        }
    }
    for (int j = 0; j < NR; j++) {
        float sum_of[MR];
        if constexpr (MR == 4) {
            Vec4 four = sums(total[0][j], total[1][j], total[2][j], total[3][j]);
            std::memcpy(sum_of, &four, sizeof four);
        } else {
            for (int i = 0; i < MR; i++) sum_of[i] = sum(total[i][j]);
        }
        for (int i = 0; i < MR; i++) {
            float y = sum_of[i];
            for (int64_t rest = k; rest < size; rest++)
                y = multiply_add(as_float(x[i * size + rest]), as_float(w[j * size + rest]), y);
            if (p.bias) y += as_float(p.bias[n + j]);
            put(p.out + (m + i) * p.num_outputs + n + j, y);
        }
    }
}

// Rows m to m + MR by weights n to n + NR. While there are rows of the next tile's weights to fetch,
// `next` is the first of them.
template <typename Step, int MR, int NR, int FETCH, typename T, typename O>
inline void visit(const Product<T, O>& p, int64_t m, int64_t n, const T*& next, const T* end) {
    if (next < end)
        tile<Step, MR, NR, FETCH>(p, m, n, next);
    else
        tile<Step, MR, NR, 0>(p, m, n, next);
    next += FETCH * p.num_columns;
}

template <typename Step, int NR, int FETCH, typename T, typename O>
inline void weights(const Product<T, O>& p, int64_t first, int64_t last, int64_t n) {
    const T *next = p.w + (n + NR) * p.num_columns, *end = next + NR * p.num_columns;
    int64_t m = first;
    for (; m + ROWS <= last; m += ROWS) visit<Step, ROWS, NR, FETCH>(p, m, n, next, end);
    if constexpr (Step::HAS_LOW_TILES) {
        if (last - m == 3) return visit<Step, 3, NR, FETCH>(p, m, n, next, end);
        if (last - m == 2) return visit<Step, 2, NR, FETCH>(p, m, n, next, end);
    }
    for (; m < last; m++) visit<Step, 1, NR, FETCH>(p, m, n, next, end);
}

inline int64_t linear_tiles_of(int64_t num_outputs) { return (num_outputs + WEIGHTS - 1) / WEIGHTS; }

// Tile t of the outputs, of rows first to last.
template <typename Step, typename T, typename O>
inline void linear_tile(const Product<T, O>& p, int64_t first, int64_t last, int64_t t) {
    int64_t rest = (last - first) % ROWS, n = t * WEIGHTS;
    int64_t visits = (last - first) / ROWS + (Step::HAS_LOW_TILES ? rest > 0 : rest);
    if (n + WEIGHTS > p.num_outputs)
        for (; n < p.num_outputs; n++) weights<Step, 1, 0>(p, first, last, n);
    else if (visits >= 4)
        weights<Step, WEIGHTS, WEIGHTS / 3>(p, first, last, n);
    else if (visits >= 2)
        weights<Step, WEIGHTS, (WEIGHTS + 1) / 2>(p, first, last, n);
    else
        weights<Step, WEIGHTS, WEIGHTS>(p, first, last, n);
}

template <typename T, typename O>
void linear(const Product<T, O>& p, int64_t num_rows, int threads) {
    int64_t num_tiles = linear_tiles_of(p.num_outputs);
    for (int64_t first = 0; first < num_rows; first += BLOCK_ROWS) {
        int64_t last = std::min(first + BLOCK_ROWS, num_rows);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t t = 0; t < num_tiles; t++) linear_tile<Fastest<T>>(p, first, last, t);
    }
}

// Causal attention over paged keys and values, the queries of a kv head together.
//
// Online softmax (Milakov and Gimelshein, 2018) over runs of KEYS tokens at absolute positions. The
// sums of a query row are in order of position, so that they do not depend on the step. Only tokens
// of the row's own sequence, up to its own position, are read.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"

constexpr int KEYS = 64;  // tokens per run
constexpr int TILE = 4;   // query rows whose sums are in registers at the same time

struct Shape {
    int64_t q_heads, kv_heads, dim;
    float scale;    // of a score
    float v_scale;  // of a stored value
};

// Scores of up to TILE rows [TILE][dim] with each of `count` keys, into [row][KEYS].
template <int R, typename S>
inline void score(const float* q, const S* const* keys, int count, int64_t dim, float* scores) {
    float parts[R][KEYS][4];
    for (int t = 0; t < count; t++) {
        Vec total[R] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            Vec key = load(keys[t] + d);
            for (int r = 0; r < R; r++) total[r] = multiply_add(load(q + r * dim + d), key, total[r]);
        }
        for (int r = 0; r < R; r++) {
            Vec4 part = fold(total[r]);
            std::memcpy(parts[r][t], &part, sizeof part);
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < count; t++) {
            const float* f = parts[r][t];
            scores[r * KEYS + t] = (f[0] + f[2]) + (f[1] + f[3]);
        }
}

// Add weights [row][KEYS] times values, tokens `first` to `last`, to sums [row][dim].
template <int R, typename S>
inline void accumulate(const float* weights, const S* const* values, int first, int last,
                       int64_t dim, float* sums) {
    for (int64_t d = 0; d < dim; d += 4 * LANES) {
        int vectors = int(std::min<int64_t>(4, (dim - d) / LANES));
        Vec total[R][4] = {};
        for (int r = 0; r < R; r++)
            for (int v = 0; v < vectors; v++) total[r][v] = load(sums + r * dim + d + v * LANES);
        auto run = [&](auto vectors) {
            for (int t = first; t < last; t++) {
                Vec value[4];
                for (int v = 0; v < vectors; v++) value[v] = load(values[t] + d + v * LANES);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < vectors; v++)
                        total[r][v] =
                            multiply_add(value[v], splat(weights[r * KEYS + t]), total[r][v]);
            }
        };
        if (vectors == 4)
            run(std::integral_constant<int, 4>());
        else
            run(vectors);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < vectors; v++) store(sums + r * dim + d + v * LANES, total[r][v]);
    }
}

// Up to TILE rows of one kv head; row r attends to the tokens before seen[r], which rises with r.
template <int R, typename S>
void attend_rows(const float* q, const int64_t* seen, const Cache<S>& k, const Cache<S>& v,
                 const int32_t* blocks, int64_t head, const Shape& shape, float* sums) {
    float top[R], total[R], scores[R * KEYS];
    const S *keys[KEYS], *values[KEYS];
    std::fill(top, top + R, -INFINITY);
    std::fill(total, total + R, 0.0f);
    std::fill(sums, sums + R * shape.dim, 0.0f);
    for (int64_t start = 0; start < seen[R - 1]; start += KEYS) {
        int count = int(std::min<int64_t>(KEYS, seen[R - 1] - start));
        for (int t = 0; t < count; t++) {
            int64_t position = start + t, block = blocks[position / k.block_size];
            int64_t slot = block * k.block_size + position % k.block_size;
            keys[t] = k.at(slot, head);
            values[t] = v.at(slot, head);
        }
        score<R>(q, keys, count, shape.dim, scores);
        int shared = count;  // tokens that all rows attend to
        for (int r = 0; r < R; r++) {
            int own = int(std::clamp<int64_t>(seen[r] - start, 0, count));
            shared = std::min(shared, own);
            float* row = scores + r * KEYS;
            std::fill(row + own, row + KEYS, -INFINITY);
            Vec most = load(row);
            for (int t = LANES; t < KEYS; t += LANES) {
                Vec some = load(row + t);
                most = some > most ? some : most;
            }
            float highest = top[r];
            for (int lane = 0; lane < LANES; lane++) highest = std::max(highest, most[lane]);
            if (highest == -INFINITY) continue;
            Vec weight_sum = {};
            for (int t = 0; t < KEYS; t += LANES) {
                Vec weight = exponential(load(row + t) - highest);
                store(row + t, weight);
                weight_sum += weight;
            }
            float kept = exponential(splat(top[r] - highest))[0];
            total[r] = multiply_add(total[r], kept, sum(weight_sum));
            for (int64_t d = 0; d < shape.dim; d += LANES)
                store(sums + r * shape.dim + d, load(sums + r * shape.dim + d) * kept);
            top[r] = highest;
        }
        accumulate<R>(scores, values, 0, shared, shape.dim, sums);
        for (int r = 0; r < R; r++) {
            int own = int(std::clamp<int64_t>(seen[r] - start, 0, count));
            accumulate<1>(scores + r * KEYS, values, shared, own, shape.dim, sums + r * shape.dim);
        }
    }
    for (int r = 0; r < R; r++)
        for (int64_t d = 0; d < shape.dim; d += LANES)
            store(sums + r * shape.dim + d,
                  load(sums + r * shape.dim + d) * (shape.v_scale / total[r]));
}

struct Step {
    const int32_t *query_start, *context_lens, *block_tables;
    int64_t num_sequences, table_width;
};

// The rows of sequence s and kv head h, TILE at a time, ordered by token, then by head.
template <typename T, typename S>
void attend_sequence(const T* q, const Cache<S>& k, const Cache<S>& v, const Step& step, int64_t s,
                     int64_t first_row, int64_t last_row, int64_t head, const Shape& shape, T* out,
                     float* scratch) {
    int64_t group = shape.q_heads / shape.kv_heads, dim = shape.dim;
    int64_t begin = step.query_start[s], context = step.context_lens[s];
    int64_t hidden = context - (step.query_start[s + 1] - begin);  // tokens before the queries
    const int32_t* blocks = step.block_tables + s * step.table_width;
    float *rows = scratch, *sums = scratch + TILE * dim;
    for (int64_t row = first_row; row < last_row; row += TILE) {
        int count = int(std::min<int64_t>(TILE, last_row - row));
        int64_t seen[TILE], place[TILE];
        for (int r = 0; r < count; r++) {
            int64_t token = (row + r) / group;
            seen[r] = hidden + token + 1;
            place[r] = ((begin + token) * shape.q_heads + head * group + (row + r) % group) * dim;
            for (int64_t d = 0; d < dim; d += LANES)
                store(rows + r * dim + d, load(q + place[r] + d) * shape.scale);
        }
        switch (count) {
            case 1: attend_rows<1>(rows, seen, k, v, blocks, head, shape, sums); break;
            case 2: attend_rows<2>(rows, seen, k, v, blocks, head, shape, sums); break;
            case 3: attend_rows<3>(rows, seen, k, v, blocks, head, shape, sums); break;
            default: attend_rows<4>(rows, seen, k, v, blocks, head, shape, sums);
        }
        for (int r = 0; r < count; r++)
            for (int64_t d = 0; d < dim; d += LANES)
                store(out + place[r] + d, load(sums + r * dim + d));
    }
}

// q, out: [T, Hq, D]; rows without a sequence or a context become 0.
template <typename T, typename S>
void attention(const T* q, Cache<S> k, Cache<S> v, Step step, Shape shape, T* out,
               int64_t num_tokens, int threads) {
    struct Item {
        int64_t sequence, first_row, last_row;
    };
    constexpr int64_t ITEM_ROWS = 64;
    int64_t group = shape.q_heads / shape.kv_heads;
    std::vector<Item> items;
    int64_t covered = 0;
    for (int64_t s = 0; s < step.num_sequences; s++) {
        int64_t begin = step.query_start[s], end = step.query_start[s + 1];
        if (step.context_lens[s] <= 0 || end <= begin) continue;
        covered += end - begin;
        int64_t rows = (end - begin) * group;
        for (int64_t row = 0; row < rows; row += ITEM_ROWS)
            items.push_back({s, row, std::min(row + ITEM_ROWS, rows)});
    }
    if (covered < num_tokens)
        std::memset((void*)out, 0, num_tokens * shape.q_heads * shape.dim * sizeof(T));
    int64_t num_items = int64_t(items.size()) * shape.kv_heads;
#pragma omp parallel num_threads(threads) if (num_items > 1)
    {
        std::vector<float> scratch(2 * TILE * shape.dim);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items; i++) {
            const Item& item = items[i / shape.kv_heads];
            attend_sequence(q, k, v, step, item.sequence, item.first_row, item.last_row,
                            i % shape.kv_heads, shape, out, scratch.data());
        }
    }
}

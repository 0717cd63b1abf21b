// Causal attention over paged keys and values, the queries of a kv head together.
//
// Online softmax (Milakov and Gimelshein, 2018) over runs of KEYS tokens at absolute positions. The
// sums of a query row are in order of position, so that they do not depend on the step. Only tokens
// of the row's own sequence, up to its own position, are read, and with a window only its last ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"

constexpr int KEYS = 64;  // tokens per run
constexpr int TILE = 4;   // query rows whose sums are in registers at the same time

struct Shape {
    int64_t q_heads, kv_heads, dim;
    float scale;         // of a score
    float v_scale;       // of a stored value
    int64_t window;      // tokens that a row attends to at most; 0: all
    float softcap;       // 0: none
    const float* sinks;  // [q_heads], or null
};

struct Span {  // tokens `first` to `last` - 1 of a sequence
    int64_t first, last;
};

// Scores of up to TILE rows [TILE][dim] with keys `first` to `last` - 1, into [row][KEYS].
template <int R, typename S>
inline void score(const float* q, const S* const* keys, int first, int last, int64_t dim,
                  float* scores) {
    float parts[R][KEYS][4];
    for (int t = first; t < last; t++) {
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
        for (int t = first; t < last; t++) {
            const float* f = parts[r][t];
            scores[r * KEYS + t] = (f[0] + f[2]) + (f[1] + f[3]);
        }
}

// Cap scores [row][KEYS] of keys `first` to `last` - 1 softly, a vector at a time.
inline void cap(float* scores, int num_rows, int first, int last, float softcap) {
    for (int r = 0; r < num_rows; r++)
        for (int t = first / LANES * LANES; t < last; t += LANES) {
            float* some = scores + r * KEYS + t;
            store(some, tangent(load(some) * (1.0f / softcap)) * softcap);
        }
}

// Add weights [row][KEYS] times values, tokens `first` to `last`, to sums [row][dim].
template <int R, typename S>
inline void accumulate(const float* weights, const S* const* values, int first, int last,
                       int64_t dim, float* sums) {
    if (first >= last) return;
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

// Up to TILE rows of one kv head; row r attends to the tokens of seen[r], whose ends rise with r. Where
// there are sinks [R], a row's sum starts with its sink, which has no value.
template <int R, typename S>
void attend_rows(const float* q, const Span* seen, const float* sinks, const Cache<S>& k,
                 const Cache<S>& v, const int32_t* blocks, int64_t head, const Shape& shape,
                 float* sums) {
    float top[R], total[R], scores[R * KEYS];
    const S *keys[KEYS], *values[KEYS];
    for (int r = 0; r < R; r++) {
        top[r] = sinks ? sinks[r] : -INFINITY;
        total[r] = sinks ? 1.0f : 0.0f;
    }
    std::fill(sums, sums + R * shape.dim, 0.0f);
    int64_t last_key = seen[R - 1].last;
    for (int64_t start = seen[0].first / KEYS * KEYS; start < last_key; start += KEYS) {
        int begin = int(std::max<int64_t>(0, seen[0].first - start));
        int count = int(std::min<int64_t>(KEYS, last_key - start));
        for (int t = begin; t < count; t++) {
            int64_t position = start + t, block = blocks[position / k.block_size];
            int64_t slot = block * k.block_size + position % k.block_size;
            keys[t] = k.at(slot, head);
            values[t] = v.at(slot, head);
        }
        score<R>(q, keys, begin, count, shape.dim, scores);
        if (shape.softcap > 0) cap(scores, R, begin, count, shape.softcap);
        int first[R], last[R], shared_first = begin, shared_last = count;  // of all rows
        for (int r = 0; r < R; r++) {
            first[r] = int(std::clamp<int64_t>(seen[r].first - start, 0, count));
            last[r] = int(std::clamp<int64_t>(seen[r].last - start, 0, count));
            shared_first = std::max(shared_first, first[r]);
            shared_last = std::min(shared_last, last[r]);
            float* row = scores + r * KEYS;
            std::fill(row, row + first[r], -INFINITY);
            std::fill(row + last[r], row + KEYS, -INFINITY);
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
        if (shared_first >= shared_last) shared_first = shared_last = 0;
        auto alone = [&](int r, int from, int to) {
            accumulate<1>(scores + r * KEYS, values, from, to, shape.dim, sums + r * shape.dim);
        };
        for (int r = 0; r < R; r++) alone(r, first[r], std::min(last[r], shared_first));
        accumulate<R>(scores, values, shared_first, shared_last, shape.dim, sums);
        for (int r = 0; r < R; r++) alone(r, std::max(first[r], shared_last), last[r]);
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
        Span seen[TILE];
        int64_t place[TILE];
        float logits[TILE];
        for (int r = 0; r < count; r++) {
            int64_t token = (row + r) / group, q_head = head * group + (row + r) % group;
            int64_t last = hidden + token + 1;
            seen[r] = {shape.window ? std::max<int64_t>(0, last - shape.window) : 0, last};
            place[r] = ((begin + token) * shape.q_heads + q_head) * dim;
            if (shape.sinks) logits[r] = shape.sinks[q_head];
            for (int64_t d = 0; d < dim; d += LANES)
                store(rows + r * dim + d, load(q + place[r] + d) * shape.scale);
        }
        const float* sinks = shape.sinks ? logits : nullptr;
        switch (count) {
            case 1: attend_rows<1>(rows, seen, sinks, k, v, blocks, head, shape, sums); break;
            case 2: attend_rows<2>(rows, seen, sinks, k, v, blocks, head, shape, sums); break;
            case 3: attend_rows<3>(rows, seen, sinks, k, v, blocks, head, shape, sums); break;
            default: attend_rows<4>(rows, seen, sinks, k, v, blocks, head, shape, sums);
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

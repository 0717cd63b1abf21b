// The functions that Python calls: each kernel for fp32 and bf16, attention also over an fp8 cache,
// and a bf16 product with fp32 results.
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "norm_linear.h"
#include "quantized_experts.h"
#include "tiles.h"

#define FOR_EACH_TYPE(define) define(float, fp32) define(bf16, bf16)
#define FOR_EACH_CACHE(define)                                                                    \
    define(float, float, fp32_fp32) define(float, fp8, fp32_fp8) define(bf16, bf16, bf16_bf16)    \
        define(bf16, fp8, bf16_fp8)

extern "C" {

#define LINEAR(op, T, O, name)                                                                    \
    void op##_##name(const T* x, const T* w, const T* bias, O* out, int64_t num_rows,             \
                     int64_t num_outputs, int64_t num_columns, int threads) {                     \
        op(Product<T, O>{x, w, bias, out, num_outputs, num_columns}, num_rows, threads);          \
    }
LINEAR(linear, float, float, fp32_fp32)
LINEAR(linear, bf16, bf16, bf16_bf16)
LINEAR(linear, bf16, float, bf16_fp32)
LINEAR(linear_tiles, bf16, bf16, bf16_bf16)
LINEAR(linear_tiles, bf16, float, bf16_fp32)

int has_tiles_bf16() { return HAS_TILES; }
int has_amx_bf16() { return has_amx(); }

#define LINEAR_QUANTIZED(T, O, name)                                                              \
    void linear_quantized_##name(const Quantized* by, const T* x, const T* bias, O* out,          \
                                 int64_t num_rows, int threads) {                                 \
        linear_quantized(*by, x, bias, out, num_rows, threads);                                   \
    }
LINEAR_QUANTIZED(float, float, fp32_fp32)
LINEAR_QUANTIZED(bf16, bf16, bf16_bf16)
LINEAR_QUANTIZED(bf16, float, bf16_fp32)

#define NORM_LINEAR(op, By, T, name)                                                              \
    void norm_##op##_##name(const By* by, const T* bias, const T* x, const T* residual,           \
                            const T* norm, float eps, T* total, T* out, int64_t num_tokens,       \
                            int threads) {                                                        \
        norm_linear(*by, bias, Normed<T>{x, residual, norm, eps, total}, out, num_tokens,         \
                    threads);                                                                     \
    }                                                                                             \
    void norm_gated_##op##_##name(const By* by, const T* bias, const T* x, const T* residual,     \
                                  const T* norm, float eps, T* total, T* out, int64_t num_tokens, \
                                  int threads) {                                                  \
        norm_gated_linear(*by, bias, Normed<T>{x, residual, norm, eps, total}, out, num_tokens,   \
                          threads);                                                               \
    }
#define NORM_LINEARS(T, name)                                                                     \
    NORM_LINEAR(linear, Matrix<T>, T, name) NORM_LINEAR(linear_quantized, Quantized, T, name)
FOR_EACH_TYPE(NORM_LINEARS)

#define ROUTE(T, name)                                                                            \
    void route_##name(const T* logits, int32_t* chosen, T* weights, int64_t num_tokens,           \
                      int64_t num_experts, int64_t top_k, int normalised, int threads) {          \
        route(logits, chosen, weights, num_tokens, num_experts, top_k, normalised, threads);      \
    }
FOR_EACH_TYPE(ROUTE)

#define EXPERTS(T, name)                                                                          \
    void experts_##name(const T* gate_up, const T* down, const T* gate_up_bias,                   \
                        const T* down_bias, int64_t num_experts, int64_t size, int64_t width,     \
                        int64_t in_tiles, float alpha, float limit, float shift, const T* x,      \
                        const int32_t* chosen, const T* weights, T* out, int64_t num_tokens,      \
                        int64_t top_k, int threads) {                                             \
        Experts<T> by{gate_up,     down,  gate_up_bias, down_bias,           num_experts,         \
                      size,        width, in_tiles,     {alpha, limit, shift}};                   \
        experts(by, x, chosen, weights, out, num_tokens, top_k, threads);                         \
    }
FOR_EACH_TYPE(EXPERTS)

#define EXPERTS_QUANTIZED(T, name)                                                                \
    void experts_quantized_##name(                                                                \
        const Quantized* gates, const Quantized* ups, const Quantized* downs,                     \
        const T* gate_up_bias, const T* down_bias, int64_t num_experts, int64_t size,             \
        int64_t width, float alpha, float limit, float shift, const T* x, const int32_t* chosen,  \
        const T* weights, T* out, int64_t num_tokens, int64_t top_k, int threads) {               \
        QuantizedExperts<T> by{gates,       ups,  downs, gate_up_bias,         down_bias,         \
                               num_experts, size, width, {alpha, limit, shift}};                  \
        experts(by, x, chosen, weights, out, num_tokens, top_k, threads);                         \
    }
FOR_EACH_TYPE(EXPERTS_QUANTIZED)

#define ADD_RMS_NORM(T, name)                                                                     \
    void add_rms_norm_##name(const T* x, const T* residual, const T* weight, float eps,           \
                             T* normed, T* total, int64_t num_tokens, int64_t size,               \
                             int threads) {                                                       \
        add_rms_norm(x, residual, weight, eps, normed, total, num_tokens, size, threads);         \
    }
FOR_EACH_TYPE(ADD_RMS_NORM)

#define SILU_AND_MUL(T, name)                                                                     \
    void silu_and_mul_##name(const T* x, T* out, int64_t num_tokens, int64_t size, int threads) { \
        silu_and_mul(x, out, num_tokens, size, threads);                                          \
    }
FOR_EACH_TYPE(SILU_AND_MUL)

#define GELU_TANH_AND_MUL(T, name)                                                                \
    void gelu_tanh_and_mul_##name(const T* x, T* out, int64_t num_tokens, int64_t size,           \
                                  int threads) {                                                  \
        gelu_tanh_and_mul(x, out, num_tokens, size, threads);                                     \
    }
FOR_EACH_TYPE(GELU_TANH_AND_MUL)

#define GREEDY(T, name)                                                                           \
    void greedy_##name(const T* logits, int64_t* ids, int64_t num_rows, int64_t stride,           \
                       int64_t size, int threads) {                                               \
        greedy(logits, ids, num_rows, stride, size, threads);                                     \
    }
FOR_EACH_TYPE(GREEDY)

#define APPLY_ROPE(T, name)                                                                       \
    bool apply_rope_##name(const T* x, const int64_t* positions, const float* cos_sin, T* out,    \
                           int64_t num_tokens, int64_t heads, int64_t dim, int64_t num_positions, \
                           int64_t rotated, int threads) {                                        \
        return apply_rope(x, positions, cos_sin, out, num_tokens, heads, dim, num_positions,      \
                          rotated, threads);                                                      \
    }
FOR_EACH_TYPE(APPLY_ROPE)

#define QK_NORM_ROPE_STORE(T, name)                                                               \
    bool qk_norm_rope_store_##name(                                                               \
        const T* qkv, const T* q_weight, const T* k_weight, float eps, const int64_t* positions,  \
        const float* cos_sin, T* k, T* v, int64_t block_stride, int64_t token_stride,             \
        int64_t head_stride, int64_t block_size, const int64_t* slots, T* q, int64_t num_tokens,  \
        int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t num_slots, int64_t num_positions, \
        int64_t rotated, int threads) {                                                           \
        Cache<T> keys{k, block_stride, token_stride, head_stride, block_size}, values = keys;     \
        values.data = v;                                                                          \
        return qk_norm_rope_store(qkv, q_weight, k_weight, eps, positions, cos_sin, keys, values, \
                                  slots, q, num_tokens, q_heads, kv_heads, dim, num_slots,        \
                                  num_positions, rotated, threads);                               \
    }
FOR_EACH_TYPE(QK_NORM_ROPE_STORE)

#define ATTENTION(T, S, name)                                                                     \
    void attention_##name(                                                                        \
        const T* q, S* k, S* v, int64_t block_stride, int64_t token_stride, int64_t head_stride,  \
        int64_t block_size, const int32_t* query_start, const int32_t* context_lens,              \
        const int32_t* block_tables, int64_t num_sequences, int64_t table_width, int64_t q_heads, \
        int64_t kv_heads, int64_t dim, float scale, float v_scale, int64_t window, float softcap, \
        const float* sinks, T* out, int64_t num_tokens, int threads) {                            \
        Cache<S> keys{k, block_stride, token_stride, head_stride, block_size}, values = keys;     \
        values.data = v;                                                                          \
        Step step{query_start, context_lens, block_tables, num_sequences, table_width};           \
        Shape shape{q_heads, kv_heads, dim, scale, v_scale, window, softcap, sinks};              \
        attention(q, keys, values, step, shape, out, num_tokens, threads);                        \
    }
FOR_EACH_CACHE(ATTENTION)
}

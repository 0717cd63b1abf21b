// Vectors of sixteen fp32 lanes, or eight where a register holds only eight, and the element types.
//
// Loads, stores, rounding, the exponential and the hyperbolic tangent. Sums over lanes have a fixed
// order, so that a result depends only on its operands.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else  // a vector wider than a register would be kept in memory
constexpr int LANES = 8;
#endif
// Products and sums are fused in `multiply_add` only. A compiler that fuses them by itself may do so
// in one copy of a function and not in another, and then a row's bits depend on the other rows.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Ints4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints4){__VA_ARGS__})
#endif

struct bf16 {
    uint16_t bits;
};

struct fp8 {  // e4m3 without infinities
    uint8_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }

// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const bf16* p) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, Bits) << 16);
}

// LANES bytes as integers. GCC 12 would convert them one by one.
inline Ints widened(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    Bytes b;
    std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, Ints);
#endif
}

// Exponent and mantissa move to their place in an fp32, with an exponent that is 120 too low. This is
// right for subnormals too.
inline Vec load(const fp8* p) {
    Bits u = (Bits)widened(&p->bits), size = u & 0x7f;
    Vec v = (Vec)(size << 20) * 0x1p120f;
    return (Vec)((Bits)v | (u & 0x80) << 24 | (Bits)(size == 0x7f));
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// To the nearest bf16, ties to even; NaN stays NaN.
inline Halves rounded_bits(Vec v) {
    Bits u = (Bits)v;
    Bits near = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    Bits is_nan = (Bits)(v != v);
    return __builtin_convertvector((near & ~is_nan) | (0x7fc0 & is_nan), Halves);
}

inline void store(bf16* p, Vec v) {
    Halves h = rounded_bits(v);
    std::memcpy(p, &h, sizeof h);
}

// The value after it is written as T and read again.
inline Vec rounded(Vec v, const float*) { return v; }
inline Vec rounded(Vec v, const bf16*) {
    return (Vec)(__builtin_convertvector(rounded_bits(v), Bits) << 16);
}

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    bf16 all[LANES];
    store(all, splat(x));
    *p = all[0];
}

inline Vec4 fold(Vec v) {
    Vec8 low;
    std::memcpy(&low, &v, sizeof low);
    if constexpr (LANES == 16) {
        Vec8 high;
        std::memcpy(&high, (const char*)&v + sizeof low, sizeof high);
        low += high;
    }
    Vec4 a, b;
    std::memcpy(&a, &low, sizeof a);
    std::memcpy(&b, (const char*)&low + sizeof a, sizeof b);
    return a + b;
}

inline float sum(Vec v) {
    Vec4 f = fold(v);
    return (f[0] + f[2]) + (f[1] + f[3]);
}

// The sums of four vectors, each in the order of `sum`.
inline Vec4 sums(Vec a, Vec b, Vec c, Vec d) {
    Vec4 e = fold(a), f = fold(b), g = fold(c), h = fold(d);
    Vec4 ef = SHUFFLE(e, f, 0, 1, 4, 5) + SHUFFLE(e, f, 2, 3, 6, 7);
    Vec4 gh = SHUFFLE(g, h, 0, 1, 4, 5) + SHUFFLE(g, h, 2, 3, 6, 7);
    return SHUFFLE(ef, gh, 0, 2, 4, 6) + SHUFFLE(ef, gh, 1, 3, 5, 7);
}

// e to the x, by a polynomial of degree 6 over Cody and Waite's reduction: within 2 units in the last
// place between -87 and 88; 0 below that range and e to the 88 above it.
inline Vec exponential(Vec x) {
    Bits too_small = (Bits)(x < -87.0f);
    x = x > 88.0f ? splat(88.0f) : x;
    x = (Vec)((Bits)x & ~too_small);
    Vec n = x * 1.44269504f;
    n = (n + 12582912.0f) - 12582912.0f;  // to the nearest integer
    Vec r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f})
        p = multiply_add(p, r, splat(next));
    p = multiply_add(p, r * r, r) + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return (Vec)((Bits)(p * (Vec)power) & ~too_small);
}

// The hyperbolic tangent: from 0.625 on by the exponential, below it (where that would cancel) by an
// odd polynomial of degree 11, fitted for the least relative error.
inline Vec tangent(Vec x) {
    Vec square = x * x, p = splat(-5.7170447e-3f);
    for (float next : {2.0650586e-2f, -5.3743497e-2f, 1.33314908e-1f, -3.33332837e-1f})
        p = multiply_add(p, square, splat(next));
    Vec near = multiply_add(x * square, p, x);
    Bits sign = (Bits)x & 0x80000000u;
    Vec size = (Vec)((Bits)x ^ sign);
    Vec far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return size < 0.625f ? near : (Vec)((Bits)far | sign);
}

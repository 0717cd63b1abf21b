// Rows of quantized weights as numbers: each kind's codes, scales and offsets.
//
// A row is expanded to the values that `nv_kernels.reference` multiplies by, in fp32 or rounded once to
// bf16. GGUF's blocks are read where they lie; nv_kernels/linear/quantized describes them.
#pragma once
#include <algorithm>

#include "elementwise.h"
#include "vectors.h"

// As `nv_kernels.cpp.quantized_weight` numbers them.
enum Kind : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BITS_4, BITS_8, FP8, INT8 };
enum Number : int64_t { NONE, FP16, BF16, FP32, UINT8 };

// Some rows of a matrix, one below the other. `scale` and `offset` are [rows / scale_rows, groups];
// blocks have theirs among the codes. Without a scale the codes themselves are the values.
struct Rows {
    const uint8_t* codes;
    int64_t stride, row_bytes, num_rows, kind;  // stride: bytes from a row to the next
    const void *scale, *offset;
    int64_t scale_type, offset_type, scale_rows, group_size;
};

constexpr int VECTORS = 32 / LANES;  // codes are expanded 32 at a time

inline float fp16_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    uint32_t bits = uint32_t(half & 0x7fff) << 13;  // the exponent is 112 too low
    float size;
    std::memcpy(&size, &bits, sizeof size);
    return (half & 0x8000 ? -size : size) * 0x1p112f;
#endif
}

inline float number_at(const void* p, int64_t type, int64_t i) {
    if (type == FP16) return fp16_at((const uint8_t*)p + 2 * i);
    if (type == BF16) return as_float(((const bf16*)p)[i]);
    if (type == FP32) return ((const float*)p)[i];
    return float(((const uint8_t*)p)[i]);
}

inline Vec floats(const uint8_t* p) { return __builtin_convertvector(widened(p), Vec); }

// Bytes from -128 to 127.
inline Vec signed_floats(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    return __builtin_convertvector((widened(p) ^ 128) - 128, Vec);
#endif
}

inline void put_32(float* out, const Vec* values) {
    for (int i = 0; i < VECTORS; i++) store(out + i * LANES, values[i]);
}

inline void put_32(bf16* out, const Vec* values) {
#if defined(__AVX512BF16__)
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
    _mm512_storeu_si512(out, both);
#else
    for (int i = 0; i < VECTORS; i++) store(out + i * LANES, values[i]);
#endif
}

typedef uint8_t Codes __attribute__((vector_size(32)));

inline Codes codes_at(const uint8_t* p) {
    Codes codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}

// The i-th LANES of 32 codes.
inline Vec floats(Codes codes, int i) {
#if defined(__AVX512F__)
    __m128i some = i ? _mm256_extracti128_si256((__m256i)codes, 1)
                     : _mm256_castsi256_si128((__m256i)codes);
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some));
#else
    uint8_t single[32];
    std::memcpy(single, &codes, sizeof single);
    return floats(single + i * LANES);
#endif
}

// 16 bytes -> the codes in the low halves, then those in the high ones.
inline Codes halves_at(const uint8_t* p) {
#if defined(__AVX2__)
    __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_srli_epi16(low, 4);
    return (Codes)_mm256_set_m128i(high, low) & 15;
#else
    uint8_t single[32];
    for (int i = 0; i < 16; i++) single[i] = p[i] & 15, single[16 + i] = p[i] >> 4;
    return codes_at(single);
#endif
}

// 16 bytes -> each one's two neighbours, the low half first.
inline Codes pairs_at(const uint8_t* p) {
#if defined(__AVX2__)
    __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_srli_epi16(low, 4);
    __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    return (Codes)both & 15;
#else
    uint8_t single[32];
    for (int i = 0; i < 16; i++) single[2 * i] = p[i] & 15, single[2 * i + 1] = p[i] >> 4;
    return codes_at(single);
#endif
}

// Add 16 to each code whose bit is set.
inline Codes with_fifth_bits(Codes codes, uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return codes | (Codes)_mm256_maskz_set1_epi8(bits, 16);
#else
    uint8_t fifth[32];
    for (int i = 0; i < 32; i++) fifth[i] = (bits >> i & 1) << 4;
    return codes | codes_at(fifth);
#endif
}

// 32 codes; the first and the second 16 may have different scales.
template <typename T>
inline void expand_codes(Codes codes, const float (&scale)[2], const float (&offset)[2], T* out) {
    Vec values[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
        int half = i * LANES / 16;
        values[i] = multiply_add(floats(codes, i), splat(scale[half]), splat(offset[half]));
    }
    put_32(out, values);
}

template <typename T>
inline void expand_codes(Codes codes, float scale, float offset, T* out) {
    expand_codes(codes, {scale, scale}, {offset, offset}, out);
}

// 32 codes from -128 to 127.
template <typename T>
inline void expand_signed(const uint8_t* codes, float scale, T* out) {
    Vec values[VECTORS];
    for (int i = 0; i < VECTORS; i++) values[i] = signed_floats(codes + i * LANES) * scale;
    put_32(out, values);
}

// The 32 codes in the low (SHIFT 0) or the high halves (SHIFT 4) of as many bytes.
template <int SHIFT, typename T>
inline void expand_nibbles(const uint8_t* p, float scale, float offset, T* out) {
    expand_codes(codes_at(p) >> SHIFT & 15, scale, offset, out);
}

template <typename T>
inline void expand_halves(const uint8_t* p, float scale, float offset, T* out) {
    expand_codes(halves_at(p), scale, offset, out);
}

template <typename T>
inline void expand_pairs(const uint8_t* p, float scale, float offset, T* out) {
    expand_codes(pairs_at(p), scale, offset, out);
}

#if defined(__AVX512BF16__)
// To bf16, the 16 values of a code are a table, in which a word's lowest 4 bits are an index.
inline void look_up(__m512i words, Vec scale, Vec offset, bf16* out) {
    const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec values = multiply_add(codes, scale, offset);
    __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)values));
    __m512i index = _mm512_and_si512(words, _mm512_set1_epi16(15));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
}

template <int SHIFT>
inline void expand_nibbles(const uint8_t* p, float scale, float offset, bf16* out) {
    __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    look_up(_mm512_srli_epi16(words, SHIFT), splat(scale), splat(offset), out);
}

inline void expand_halves(const uint8_t* p, Vec scale, Vec offset, bf16* out) {
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    look_up(_mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), shifts), scale, offset, out);
}

inline void expand_halves(const uint8_t* p, float scale, float offset, bf16* out) {
    expand_halves(p, splat(scale), splat(offset), out);
}

inline void expand_pairs(const uint8_t* p, float scale, float offset, bf16* out) {
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    __m512i words = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    look_up(words, splat(scale), splat(offset), out);
}

// Both fp16 numbers are converted at once, which makes it faster by an eighth.
inline void expand_q4_1(const uint8_t* block, bf16* out) {
    __m128 both = _mm_cvtph_ps(_mm_loadu_si32(block));
    Vec scale = (Vec)_mm512_broadcastss_ps(both);
    __m512 second = _mm512_permutexvar_ps(_mm512_set1_epi32(1), _mm512_castps128_ps512(both));
    expand_halves(block + 4, scale, (Vec)second, out);
}
#endif

template <typename T>
inline void expand_q4_1(const uint8_t* block, T* out) {
    expand_halves(block + 4, fp16_at(block), fp16_at(block + 2), out);
}

// Blocks of 32 values, from `block` on.
template <int64_t KIND, typename T>
inline void expand_small_blocks(const uint8_t* block, int64_t size, T* out) {
    for (int64_t k = 0; k < size; k += 32, out += 32) {
        if constexpr (KIND == Q4_0) {
            float d = fp16_at(block);
            expand_halves(block + 2, d, -8 * d, out), block += 18;
        } else if constexpr (KIND == Q4_1) {
            expand_q4_1(block, out), block += 20;
        } else if constexpr (KIND == Q8_0) {
            expand_signed(block + 2, fp16_at(block), out), block += 34;
        } else {  // Q5: the fifth bits are a word
            constexpr int64_t head = KIND == Q5_0 ? 2 : 4;
            float d = fp16_at(block), offset = KIND == Q5_0 ? -16 * d : fp16_at(block + 2);
            uint32_t fifth;
            std::memcpy(&fifth, block + head, sizeof fifth);
            Codes codes = with_fifth_bits(halves_at(block + head + 4), fifth);
            expand_codes(codes, d, offset, out), block += head + 20;
        }
    }
}

// The scales and offsets of the 8 groups of a block: 6 bits each, spread over 12 bytes.
inline void scales_of_block(const uint8_t* block, float* scales, float* offsets) {
    uint32_t packed[3], codes[4];
    std::memcpy(packed, block + 4, sizeof packed);
    codes[0] = packed[0] & 0x3f3f3f3f, codes[2] = packed[1] & 0x3f3f3f3f;
    codes[1] = (packed[2] & 0x0f0f0f0f) | (packed[0] >> 2 & 0x30303030);
    codes[3] = (packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 2 & 0x30303030);
    float d = fp16_at(block), least = -fp16_at(block + 2);
    const uint8_t* each = (const uint8_t*)codes;
    for (int s = 0; s < 8; s++) scales[s] = d * each[s], offsets[s] = least * each[8 + s];
}

// Blocks of 256 values in groups of 32: Q4_K and Q5_K.
template <typename T>
inline void expand_k_blocks(int64_t kind, const uint8_t* block, int64_t size, T* out) {
    const int64_t first = kind == Q4_K ? 16 : 48;  // of the low 4 bits
    for (int64_t k = 0; k < size; k += 256, block += first + 128) {
        float scales[8], offsets[8];
        scales_of_block(block, scales, offsets);
        for (int s = 0; s < 8; s++, out += 32) {
            const uint8_t* low = block + first + s / 2 * 32;
            if (kind == Q4_K) {
                s % 2 ? expand_nibbles<4>(low, scales[s], offsets[s], out)
                      : expand_nibbles<0>(low, scales[s], offsets[s], out);
                continue;
            }
            Codes fifth = codes_at(block + 16) >> s & 1;
            expand_codes((codes_at(low) >> s % 2 * 4 & 15) | fifth << 4, scales[s], offsets[s], out);
        }
    }
}

// Blocks of 256 values in groups of 16.
template <typename T>
inline void expand_q6_k(const uint8_t* block, int64_t size, T* out) {
    for (int64_t k = 0; k < size; k += 256, block += 210) {
        const int8_t* scales = (const int8_t*)block + 192;
        float d = fp16_at(block + 208);
        for (int s = 0; s < 8; s++, out += 32, scales += 2) {
            const uint8_t *low = block + s / 4 * 64 + s % 2 * 32, *high = block + 128 + s / 4 * 32;
            Codes top = codes_at(high) >> s % 4 * 2 & 3;
            Codes codes = (codes_at(low) >> s % 4 / 2 * 4 & 15) | top << 4;
            float scale[2] = {d * scales[0], d * scales[1]};
            expand_codes(codes, scale, {-32 * scale[0], -32 * scale[1]}, out);
        }
    }
}

// Codes of 4 or 8 bits in groups of columns. Whole pieces of 32 codes go at once.
template <typename T>
inline void expand_groups(const Rows& p, const uint8_t* codes, int64_t row, int64_t size, T* out) {
    const int64_t groups = size / p.group_size, bits = p.kind == BITS_4 ? 4 : 8;
    for (int64_t g = 0; g < groups; g++) {
        int64_t at = row * groups + g, k = g * p.group_size, end = k + p.group_size;
        float scale = number_at(p.scale, p.scale_type, at), offset;
        if (p.offset_type == NONE)
            offset = -scale * (1 << (bits - 1));
        else if (p.offset_type == UINT8)
            offset = -scale * number_at(p.offset, UINT8, at);
        else
            offset = number_at(p.offset, p.offset_type, at);
        if (bits == 8)
            for (; k + 32 <= end; k += 32) expand_codes(codes_at(codes + k), scale, offset, out + k);
        else if (k % 2 == 0)
            for (; k + 32 <= end; k += 32) expand_pairs(codes + k / 2, scale, offset, out + k);
        for (; k < end; k++) {
            int code = bits == 8 ? codes[k] : codes[k / 2] >> k % 2 * 4 & 15;
            put(out + k, multiply_add(float(code), scale, offset));
        }
    }
}

#if defined(__AVX512BF16__)
// The bf16 of each e4m3 without its sign.
struct TableOfFp8 {
    alignas(64) bf16 values[128];
    TableOfFp8() {
        uint8_t codes[128];
        for (int i = 0; i < 128; i++) codes[i] = uint8_t(i);
        for (int i = 0; i < 128; i += LANES) store(values + i, load((const fp8*)codes + i));
    }
};
inline const TableOfFp8 TABLE_OF_FP8;

// 32 codes as bf16, which holds them exactly.
inline void convert_32(const fp8* p, bf16* out) {
    __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), parts[4];
    for (int i = 0; i < 4; i++) parts[i] = _mm512_load_si512(TABLE_OF_FP8.values + 32 * i);
    __m512i small = _mm512_permutex2var_epi16(parts[0], words, parts[1]);
    __m512i large = _mm512_permutex2var_epi16(parts[2], words, parts[3]);
    __mmask32 is_large = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x40));
    __m512i sign = _mm512_and_si512(_mm512_slli_epi16(words, 8), _mm512_set1_epi16(-0x8000));
    __m512i size = _mm512_mask_blend_epi16(is_large, small, large);
    _mm512_storeu_si512(out, _mm512_or_si512(size, sign));
}
#endif

template <typename T>
inline void convert_32(const fp8* p, T* out) {
    Vec values[VECTORS];
    for (int i = 0; i < VECTORS; i++) values[i] = load(p + i * LANES);
    put_32(out, values);
}

// e4m3, 32 codes at a time: times the scale of the columns' group, or the codes themselves.
template <typename T>
inline void expand_fp8(const Rows& p, const uint8_t* row_codes, int64_t row, int64_t size, T* out) {
    const fp8* codes = (const fp8*)row_codes;
    const int64_t groups = (size + p.group_size - 1) / p.group_size;
    for (int64_t g = 0; g < groups; g++) {
        const float* scales = (const float*)p.scale + row / p.scale_rows * groups;
        float scale = p.scale ? scales[g] : 1.0f;
        int64_t k = g * p.group_size, end = std::min(k + p.group_size, size);
        for (; !p.scale && k + 32 <= end; k += 32) convert_32(codes + k, out + k);
        by_vectors(end - k, [&](int64_t i, int count) {
            store_some(out + k + i, load_some(codes + k + i, count) * scale, count);
        });
    }
}

template <typename T>
inline void expand_int8(const uint8_t* codes, int64_t size, T* out) {
    int64_t k = 0;
    for (; k + 32 <= size; k += 32) expand_signed(codes + k, 1.0f, out + k);
    for (; k < size; k++) put(out + k, float(int8_t(codes[k])));
}

// A row's values -> out [size].
template <typename T>
inline void expand(const Rows& p, int64_t row, int64_t size, T* out) {
    const uint8_t* codes = p.codes + row * p.stride;
    switch (p.kind) {
        case Q4_0: return expand_small_blocks<Q4_0>(codes, size, out);
        case Q4_1: return expand_small_blocks<Q4_1>(codes, size, out);
        case Q5_0: return expand_small_blocks<Q5_0>(codes, size, out);
        case Q5_1: return expand_small_blocks<Q5_1>(codes, size, out);
        case Q8_0: return expand_small_blocks<Q8_0>(codes, size, out);
        case Q4_K:
        case Q5_K: return expand_k_blocks(p.kind, codes, size, out);
        case Q6_K: return expand_q6_k(codes, size, out);
        case BITS_4:
        case BITS_8: return expand_groups(p, codes, row, size, out);
        case FP8: return expand_fp8(p, codes, row, size, out);
        default: return expand_int8(codes, size, out);
    }
}

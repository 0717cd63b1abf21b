// Rows by codes of 4 bits: vectors of AVX-512 with pairs of bf16 (VDPBF16PS), an output per lane.
//
// Codes become bf16 integers in registers, which is exact. A block of 32 columns is summed alone; its
// scale multiplies the sum, and its offset the sum of x, in fp32. So no weight is rounded or written
// to memory. A row's bits do not depend on the other rows.
#pragma once

constexpr int64_t LANE_COLUMNS = 32;  // of a block
constexpr int64_t LANE_OUTPUTS = 16;
constexpr int PAIRS = LANE_COLUMNS / 2;  // of columns of a block
constexpr int64_t MOST_LANE_ROWS = 16;  // of a kernel, for which it decodes a block once

// Rows up to which this is faster than expanded tiles, which are so from 128 on. Without AMX measured (one
// core of an AMD EPYC 9004, layers of 576 by 1,536 in Q4_1); with AMX the number for tiles is kept.
inline int64_t lane_rows() { return has_amx() ? few_rows() : 32; }

// The kinds of blocks have the first 16 columns in the low halves of bytes; else neighbours share one.
inline bool is_in_halves(int64_t kind) { return kind == Q4_0 || kind == Q4_1; }

inline bool fits_lanes(const Rows& rows) {
    return is_in_halves(rows.kind) ||
           (rows.kind == BITS_4 && rows.group_size % LANE_COLUMNS == 0);
}

inline bool is_worth_lanes(const Quantized& by, int64_t num_rows) {
    int64_t first = 0;
    return by.num_outputs > 0 && by.num_columns % LANE_COLUMNS == 0 &&
           fits_lanes(by.part_of(first)) && (by.invariant || num_rows <= lane_rows());
}

// The least number of rows that a kernel has, for `count` of them.
inline int64_t kernel_rows(int64_t count) {
    return count > 12 ? 16 : count > 8 ? 12 : count > 4 ? 8 : count > 2 ? 4 : count;
}

// Rows of x for one kernel, with zeros for those that it has more: pairs of columns [K / 32, rows, 16],
// in the order in which `LaneCodes` has those of a weight, and the sum of each block [K / 32, rows].
struct LaneInput {
    int32_t* pairs;
    float* sums;
    int64_t num_rows, num_columns;

    static int64_t floats_of(int64_t num_rows, int64_t num_columns) {
        return kernel_rows(num_rows) * (num_columns / 2 + num_columns / LANE_COLUMNS);
    }

    // Rows x in memory of `floats_of(num_rows, num_columns)` floats.
    LaneInput(float* memory, const bf16* x, int64_t count, int64_t num_columns, bool in_halves)
        : pairs((int32_t*)memory), sums(memory + kernel_rows(count) * num_columns / 2),
          num_rows(kernel_rows(count)), num_columns(num_columns) {
        alignas(64) uint16_t places[LANE_COLUMNS];
        for (int i = 0; i < LANE_COLUMNS; i++) {  // dword c, shifted by 4 * shift: bytes 2 apart
            int c = i / 8, shift = i / 2 % 4, byte = 4 * c + i % 2 * 2 + shift / 2, high = shift % 2;
            places[i] = uint16_t(in_halves ? byte + 16 * high : 2 * byte + high);
        }
        for (int64_t row = 0; row < count; row++)
            read_row(x + row * num_columns, row, _mm512_load_si512(places));
        for (int64_t row = count; row < num_rows; row++) read_row(nullptr, row, __m512i{});
    }

    void read_row(const bf16* x, int64_t row, __m512i places) {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (int64_t b = 0; b < num_columns / LANE_COLUMNS; b++) {
            __m512i block = x ? _mm512_loadu_si512(x + b * LANE_COLUMNS) : __m512i{};
            __m512i placed = _mm512_permutexvar_epi16(places, block);
            _mm512_storeu_si512(pairs + (b * num_rows + row) * LANE_COLUMNS / 2, placed);
            __m512 added = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)block, ones);
            sums[b * num_rows + row] = sum((Vec)added);
        }
    }
};

// 16 rows of a weight, all of one kind.
struct LaneWeights {
    const Rows* part;
    const uint8_t* codes[LANE_OUTPUTS];
    int64_t rows[LANE_OUTPUTS];  // in the part of the first
    bool is_one_part, is_one_kind;

    // Outputs n to n + 16; those past the last are the last one again.
    LaneWeights(const Quantized& by, int64_t n) : is_one_part(true), is_one_kind(true) {
        for (int64_t i = 0; i < LANE_OUTPUTS; i++) {
            int64_t row = std::min(n + i, by.num_outputs - 1);
            const Rows& found = by.part_of(row);
            if (i == 0) part = &found;
            is_one_part &= &found == part;
            is_one_kind &= found.kind == part->kind;
            codes[i] = found.codes + row * found.stride;
            rows[i] = row;
        }
    }
};

// Reads some cache lines of some rows into the L1 cache at each call.
struct LaneFetch {
    const LaneWeights& weights;
    int64_t row = 0, at = 0;

    [[gnu::always_inline]] void some() {
        for (int i = 0; i < 5 && row < LANE_OUTPUTS; i++) {
            __builtin_prefetch(weights.codes[row] + at, 0, 3);
            at += 64;
            if (at >= weights.part->row_bytes) at = 0, row++;
        }
    }
};

inline __m128i bytes_16(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }

// The 16 bytes from `at` on of each row -> dword c of all rows.
[[gnu::always_inline]] inline void dwords_of_rows(const LaneWeights& w, int64_t at,
                                                 __m512i (&dwords)[4]) {
    __m512i four[4];
    for (int i = 0; i < 4; i++) {  // quarter q has row 4 q + i
        four[i] = _mm512_broadcast_i32x4(bytes_16(w.codes[i] + at));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0x00f0, bytes_16(w.codes[4 + i] + at));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0x0f00, bytes_16(w.codes[8 + i] + at));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0xf000, bytes_16(w.codes[12 + i] + at));
    }
    __m512i low = _mm512_unpacklo_epi32(four[0], four[1]);
    __m512i high = _mm512_unpackhi_epi32(four[0], four[1]);
    __m512i next_low = _mm512_unpacklo_epi32(four[2], four[3]);
    __m512i next_high = _mm512_unpackhi_epi32(four[2], four[3]);
    dwords[0] = _mm512_unpacklo_epi64(low, next_low);
    dwords[1] = _mm512_unpackhi_epi64(low, next_low);
    dwords[2] = _mm512_unpacklo_epi64(high, next_high);
    dwords[3] = _mm512_unpackhi_epi64(high, next_high);
}

// The fp16 in the low half of each dword.
inline Vec low_fp16(__m512i dwords) {
    return (Vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords));
}

// Scale and offset of a block of columns of each row.
template <int64_t KIND>
struct LaneScales {
    static constexpr int64_t BLOCK_BYTES = KIND == Q4_0 ? 18 : KIND == Q4_1 ? 20 : 16;
    static constexpr int64_t FIRST = BLOCK_BYTES - 16;  // of the codes
    Vec scale = {}, offset = {};
    int64_t group = -1;

    // Whether a code q is q - 8, without an offset.
    static bool is_signed(const Rows& rows) {
        return KIND == Q4_0 || (KIND == BITS_4 && rows.offset_type == NONE);
    }

    [[gnu::always_inline]] void read(const LaneWeights& w, int64_t block, int64_t num_columns) {
        if constexpr (KIND == BITS_4) {
            int64_t groups = num_columns / w.part->group_size;
            int64_t wanted = block * LANE_COLUMNS / w.part->group_size;
            if (wanted != group) read_group(w, wanted, groups);
            group = wanted;
        } else {
            __m512i heads = _mm512_setzero_si512();
            for (int i = 0; i < LANE_OUTPUTS; i++) {
                __m128i head = _mm_loadu_si32(w.codes[i] + block * BLOCK_BYTES);
                heads = _mm512_mask_broadcastd_epi32(heads, 1 << i, head);
            }
            scale = low_fp16(heads);
            if (KIND == Q4_1) offset = low_fp16(_mm512_srli_epi32(heads, 16));
        }
    }

    void read_group(const LaneWeights& w, int64_t wanted, int64_t groups) {
        const Rows& p = *w.part;
        alignas(64) float scales[LANE_OUTPUTS], offsets[LANE_OUTPUTS] = {};
        for (int i = 0; i < LANE_OUTPUTS; i++) {
            int64_t at = w.rows[i] * groups + wanted;
            scales[i] = number_at(p.scale, p.scale_type, at);
            if (p.offset_type == UINT8)
                offsets[i] = -scales[i] * number_at(p.offset, UINT8, at);
            else if (p.offset_type != NONE)
                offsets[i] = number_at(p.offset, p.offset_type, at);
        }
        scale = load(scales), offset = load(offsets);
    }
};

// bf16 of the 16 codes, twice.
inline __m512i table_of_codes(bool is_signed) {
    const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 values = (__m512)(is_signed ? codes - 8.0f : codes);
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
}

// The codes of a block, in pairs of columns, of 16 rows.
template <int64_t KIND>
struct LaneCodes {
    const __m512i table;
    __m512i dwords[4];

    explicit LaneCodes(bool is_signed) : table(table_of_codes(is_signed)) {}

    [[gnu::always_inline]] void read(const LaneWeights& w, int64_t block) {
        constexpr int64_t SIZE = LaneScales<KIND>::BLOCK_BYTES, FIRST = LaneScales<KIND>::FIRST;
        dwords_of_rows(w, block * SIZE + FIRST, dwords);
    }

    // Only the lowest 5 bits of a word are an index, and the table repeats after 4.
    [[gnu::always_inline]] __m512bh pair(int i) const {
        __m512i words = _mm512_srli_epi16(dwords[i / 4], i % 4 * 4);
        return (__m512bh)_mm512_permutexvar_epi16(words, table);
    }
};

// NUM_ROWS rows of x by 16 rows of a weight -> totals [NUM_ROWS, 16].
template <int64_t KIND, int NUM_ROWS>
void multiply_group(const LaneInput& in, const LaneWeights& w, LaneFetch& fetch, float* totals) {
    bool is_signed = LaneScales<KIND>::is_signed(*w.part);
    LaneCodes<KIND> codes(is_signed);
    LaneScales<KIND> by;
    for (int i = 0; i < NUM_ROWS; i++) store(totals + i * LANE_OUTPUTS, Vec{});
    for (int64_t block = 0; block < in.num_columns / LANE_COLUMNS; block++) {
        const int32_t* x = in.pairs + block * PAIRS * NUM_ROWS;
        fetch.some();
        by.read(w, block, in.num_columns);
        codes.read(w, block);
        __m512 parts[NUM_ROWS];
        for (auto& each : parts) each = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) {
            __m512bh some = codes.pair(pair);
            for (int i = 0; i < NUM_ROWS; i++) {
                __m512bh both = (__m512bh)_mm512_set1_epi32(x[i * PAIRS + pair]);
                parts[i] = _mm512_dpbf16_ps(parts[i], both, some);
            }
        }
        const float* sums = in.sums + block * NUM_ROWS;
        for (int i = 0; i < NUM_ROWS; i++) {
            Vec total = multiply_add((Vec)parts[i], by.scale, load(totals + i * LANE_OUTPUTS));
            if (!is_signed) total = multiply_add(by.offset, splat(sums[i]), total);
            store(totals + i * LANE_OUTPUTS, total);
        }
    }
}

template <int64_t KIND>
inline void multiply_group(const LaneInput& in, const LaneWeights& w, LaneFetch& fetch,
                           float* totals) {
    switch (in.num_rows) {
        case 1: return multiply_group<KIND, 1>(in, w, fetch, totals);
        case 2: return multiply_group<KIND, 2>(in, w, fetch, totals);
        case 4: return multiply_group<KIND, 4>(in, w, fetch, totals);
        case 8: return multiply_group<KIND, 8>(in, w, fetch, totals);
        case 12: return multiply_group<KIND, 12>(in, w, fetch, totals);
        default: return multiply_group<KIND, 16>(in, w, fetch, totals);
    }
}

// Rows of x, in groups for a kernel each, by outputs n to n + 16.
template <typename O>
inline void multiply_lane_tile(const Quantized& by, const std::vector<LaneInput>& groups,
                               const bf16* x, const bf16* bias, O* out, int64_t num_rows,
                               int64_t n) {
    int64_t count = std::min(LANE_OUTPUTS, by.num_outputs - n);
    LaneWeights weights(by, n), next(by, n + LANE_OUTPUTS);
    if (!weights.is_one_kind || (weights.part->kind == BITS_4 && !weights.is_one_part))
        return quantized_tile(by, x, (const float*)nullptr, bias, out, num_rows, n, count);
    alignas(64) float totals[MOST_LANE_ROWS * LANE_OUTPUTS];
    LaneFetch fetch{next};
    for (int64_t g = 0; g < int64_t(groups.size()); g++) {
        switch (weights.part->kind) {
            case Q4_0: multiply_group<Q4_0>(groups[g], weights, fetch, totals); break;
            case Q4_1: multiply_group<Q4_1>(groups[g], weights, fetch, totals); break;
            default: multiply_group<BITS_4>(groups[g], weights, fetch, totals);
        }
        int64_t m = g * MOST_LANE_ROWS, rows = std::min(MOST_LANE_ROWS, num_rows - m);
        finish(by, totals, LANE_OUTPUTS, nullptr, bias, out + m * by.num_outputs, rows, n, count);
    }
}

template <typename O>
inline void multiply_by_lanes(const Quantized& by, const bf16* x, const bf16* bias, O* out,
                              int64_t num_rows, int threads) {
    int64_t size = by.num_columns, first = 0;
    bool in_halves = is_in_halves(by.part_of(first).kind);
    int64_t num_groups = (num_rows + MOST_LANE_ROWS - 1) / MOST_LANE_ROWS;
    int64_t group_size = LaneInput::floats_of(std::min(num_rows, MOST_LANE_ROWS), size);
    std::unique_ptr<float[]> memory(new float[num_groups * group_size]);
    std::vector<LaneInput> groups;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t m = g * MOST_LANE_ROWS, count = std::min(MOST_LANE_ROWS, num_rows - m);
        groups.emplace_back(memory.get() + g * group_size, x + m * size, count, size, in_halves);
    }
    int64_t num_tiles = (by.num_outputs + LANE_OUTPUTS - 1) / LANE_OUTPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < num_tiles; t++)
        multiply_lane_tile(by, groups, x, bias, out, num_rows, t * LANE_OUTPUTS);
}

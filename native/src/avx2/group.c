/* Quantisation of one group with AVX2, and the storage of its codes two a byte. */
#include <immintrin.h>

#include "../scalar/group.h"
#include "widen.h"

static float lowest8(__m256 v) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_movehdup_ps(m)));
}

static float highest8(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Sixteen codes as int16. A step's inverse is finite here, so no product exceeds 2^(bits) by much. */
static inline __m256i codes16_of(const uint16_t *w, __m256 inverse, __m256i zero, __m256i low, __m256i high) {
    __m256i codes = _mm256_adds_epi16(ktq_codes16(w, inverse), zero);
    return _mm256_min_epi16(_mm256_max_epi16(codes, low), high);
}

int ktq_avx2_group(const uint16_t *w, size_t count, const ktq_grid *grid, int8_t *codes, float *scale, int8_t *zero) {
    const __m256i infinity = _mm256_set1_epi16((short)KTQ_BF16_INF), nothing = _mm256_setzero_si256();
    __m256 low8 = _mm256_set1_ps(INFINITY), high8 = _mm256_set1_ps(-INFINITY);
    __m256i bad = nothing;
    size_t j = 0;
    for (; j + 16 <= count; j += 16) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(w + j));
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi16(_mm256_and_si256(v, infinity), infinity));
        __m256 lo = ktq_widen_lo(v), hi = ktq_widen_hi(v);
        low8 = _mm256_min_ps(low8, _mm256_min_ps(lo, hi));
        high8 = _mm256_max_ps(high8, _mm256_max_ps(lo, hi));
    }
    if (!_mm256_testz_si256(bad, bad)) return KTQ_NOT_FINITE;
    float low = lowest8(low8), high = highest8(high8);
    for (; j < count; j++) {
        float x = ktq_f32_of_bf16(w[j]);
        if (!isfinite(x)) return KTQ_NOT_FINITE;
        if (x < low) low = x;
        if (x > high) high = x;
    }
    ktq_step step = ktq_group_step(low, high, grid, scale);
    j = 0;
    if (isfinite(step.inverse)) {
        const __m256 inverse = _mm256_set1_ps(step.inverse);
        const __m256i shift = _mm256_set1_epi16((short)step.zero);
        const __m256i bottom = _mm256_set1_epi16((short)step.lowest), top = _mm256_set1_epi16((short)step.highest);
        for (; j + 32 <= count; j += 32)
            ktq_store32(codes + j, codes16_of(w + j, inverse, shift, bottom, top),
                        codes16_of(w + j + 16, inverse, shift, bottom, top));
    }
    for (; j < count; j++) codes[j] = ktq_group_code(ktq_f32_of_bf16(w[j]), &step);
    if (zero) *zero = (int8_t)step.zero;
    return KTQ_OK;
}

void ktq_avx2_nibbles_pack(const int8_t *codes, size_t count, uint8_t *out) {
    const __m256i low = _mm256_set1_epi8(0x0F), eight = _mm256_set1_epi8(8);
    const __m256i weights = _mm256_set1_epi16(0x1001); /* first nibble * 1 + second * 16 */
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(codes + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(codes + i + 32));
        a = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_add_epi8(a, eight), low), weights);
        b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_add_epi8(b, eight), low), weights);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), _MM_SHUFFLE(3, 1, 2, 0));
        _mm256_storeu_si256((__m256i *)(out + i / 2), bytes);
    }
    ktq_scalar_nibbles_pack(codes + i, count - i, out + i / 2);
}

void ktq_avx2_nibbles_unpack(const uint8_t *packed, size_t count, int8_t *codes) {
    const __m256i low = _mm256_set1_epi8(0x0F), eight = _mm256_set1_epi8(8);
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
        __m256i v = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(packed + i / 2)),
                                             _MM_SHUFFLE(3, 1, 2, 0));
        __m256i first = _mm256_sub_epi8(_mm256_and_si256(v, low), eight);
        __m256i second = _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(v, 4), low), eight);
        _mm256_storeu_si256((__m256i *)(codes + i), _mm256_unpacklo_epi8(first, second));
        _mm256_storeu_si256((__m256i *)(codes + i + 32), _mm256_unpackhi_epi8(first, second));
    }
    ktq_scalar_nibbles_unpack(packed + i / 2, count - i, codes + i);
}

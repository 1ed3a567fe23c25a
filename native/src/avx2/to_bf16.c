/* Other float formats to bf16 with AVX2 and F16C: 16 values at a time, the rest by the scalar code. */
#include <immintrin.h>

#include "../table.h"

/* The 16 bits of bf16 in each 32-bit lane, rounded to nearest even; a NaN is made quiet instead of rounded. */
static inline __m256i round8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

static inline void store16(uint16_t *out, __m256 first, __m256 second) {
    __m256i both = _mm256_packus_epi32(round8(first), round8(second));
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0)));
}

/* Eight e4m3fn bytes; the arithmetic is that of the scalar code. */
static inline __m256 fp8x8(const uint8_t *x) {
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
    __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi32(0x7F));
    __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(v, magnitude), 24);
    __m256 value = _mm256_castsi256_ps(_mm256_or_si256(sign, _mm256_slli_epi32(magnitude, 20)));
    __m256i nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F));
    __m256i nan_bits = _mm256_or_si256(sign, _mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(_mm256_mul_ps(value, _mm256_set1_ps(0x1p120f)), _mm256_castsi256_ps(nan_bits),
                            _mm256_castsi256_ps(nan));
}

void ktq_avx2_fp8_row(const uint8_t *x, size_t count, float scale, uint16_t *out) {
    const __m256 s = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        store16(out + i, _mm256_mul_ps(fp8x8(x + i), s), _mm256_mul_ps(fp8x8(x + i + 8), s));
    ktq_scalar_fp8_row(x + i, count - i, scale, out + i);
}

void ktq_avx2_f16_row(const uint16_t *x, size_t count, uint16_t *out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        store16(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i + 8))));
    ktq_scalar_f16_row(x + i, count - i, out + i);
}

void ktq_avx2_f32_row(const float *x, size_t count, uint16_t *out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) store16(out + i, _mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i + 8));
    ktq_scalar_f32_row(x + i, count - i, out + i);
}

/* Other float formats to bf16 with AVX2 and F16C: 16 values at a time, the rest by the scalar code. */
#include <immintrin.h>
#include <math.h>

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

static inline __m256i round16(__m256 first, __m256 second) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(round8(first), round8(second)), _MM_SHUFFLE(3, 1, 2, 0));
}

static inline void store16(uint16_t *out, __m256 first, __m256 second) {
    _mm256_storeu_si256((__m256i *)out, round16(first, second));
}

/* Rounding commutes with powers of two, so a scale has only 16 products to look up: those of the bytes 0 to 15, which
 * stand for 0 to 15 times 2^-9. Each binade above repeats the upper eight with a larger exponent. */
void ktq_avx2_fp8_block(const uint8_t *x, size_t stride, size_t n, size_t k, float scale, uint16_t *out,
                        size_t out_stride) {
    /* No product may be subnormal or infinite; a scale that is not finite is out of these bounds too. */
    const size_t simd = fabsf(scale) > 0x1p-100f && fabsf(scale) < 0x1p100f ? k / 32 * 32 : 0;
    const __m256 first = _mm256_setr_ps(0, 0x1p-9f, 2 * 0x1p-9f, 3 * 0x1p-9f, 4 * 0x1p-9f, 5 * 0x1p-9f, 6 * 0x1p-9f,
                                        7 * 0x1p-9f);
    const __m256 second = _mm256_add_ps(first, _mm256_set1_ps(8 * 0x1p-9f)), s = _mm256_set1_ps(scale);
    const __m256i products = round16(_mm256_mul_ps(first, s), _mm256_mul_ps(second, s));
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(products, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(products, 8)),
        _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i low_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    const __m256i high_bytes = _mm256_permute2x128_si256(bytes, bytes, 0x11);

    const __m256i zero = _mm256_setzero_si256(), eight = _mm256_set1_epi8(8), nan = _mm256_set1_epi8(0x7F);
    const __m256i sign_and_exponent = _mm256_set1_epi16((short)0x8780);
    for (size_t row = 0; row < n; row++, x += stride, out += out_stride) {
        __m256i nans = zero;
        for (size_t j = 0; j < simd; j += 32) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(x + j));
            __m256i magnitude = _mm256_and_si256(v, nan);
            nans = _mm256_or_si256(nans, _mm256_cmpeq_epi8(magnitude, nan));
            /* The byte itself up to 15, else 8 + its mantissa. */
            __m256i normal = _mm256_and_si256(_mm256_min_epu8(magnitude, eight), eight);
            __m256i index = _mm256_or_si256(normal, _mm256_and_si256(magnitude, _mm256_set1_epi8(7)));
            __m256i low = _mm256_shuffle_epi8(low_bytes, index), high = _mm256_shuffle_epi8(high_bytes, index);
            /* Binades above the first, where bf16 has its exponent, and the sign. */
            __m256i above = _mm256_or_si256(_mm256_subs_epu8(magnitude, eight), _mm256_andnot_si256(nan, v));
            __m256i above0 = _mm256_srai_epi16(_mm256_unpacklo_epi8(zero, above), 4);
            __m256i above1 = _mm256_srai_epi16(_mm256_unpackhi_epi8(zero, above), 4);
            __m256i out0 = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), _mm256_and_si256(above0, sign_and_exponent));
            __m256i out1 = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), _mm256_and_si256(above1, sign_and_exponent));
            _mm256_storeu_si256((__m256i *)(out + j), _mm256_permute2x128_si256(out0, out1, 0x20));
            _mm256_storeu_si256((__m256i *)(out + j + 16), _mm256_permute2x128_si256(out0, out1, 0x31));
        }
        size_t done = _mm256_movemask_epi8(nans) ? 0 : simd;
        if (done < k) ktq_scalar_fp8_block(x + done, 0, 1, k - done, scale, out + done, 0);
    }
}

uint8_t ktq_avx2_fp8_amax(const uint8_t *x, size_t count) {
    const __m256i mask = _mm256_set1_epi8(0x7F);
    __m256i top = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= count; i += 32)
        top = _mm256_max_epu8(top, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(x + i))));
    __m128i half = _mm_max_epu8(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    half = _mm_max_epu8(half, _mm_srli_epi16(half, 8)); /* the low byte of each pair */
    half = _mm_xor_si128(_mm_and_si128(half, _mm_set1_epi16(0xFF)), _mm_set1_epi16(0xFF));
    uint8_t amax = (uint8_t)~_mm_extract_epi16(_mm_minpos_epu16(half), 0);
    uint8_t rest = ktq_scalar_fp8_amax(x + i, count - i);
    return rest > amax ? rest : amax;
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

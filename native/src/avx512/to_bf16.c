/* Other float formats to bf16 with AVX-512. */
#include <immintrin.h>
#include <math.h>

#include "../table.h"

/* The method of the avx2 folder: 16 products to look up, each binade above repeats the upper eight. */
void ktq_avx512_fp8_block(const uint8_t *x, size_t stride, size_t n, size_t k, float scale, uint16_t *out,
                          size_t out_stride) {
    const size_t simd = fabsf(scale) > 0x1p-100f && fabsf(scale) < 0x1p100f ? k / 64 * 64 : 0;
    static const uint8_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint16_t products[16];
    uint8_t lows[16], highs[16];
    ktq_scalar_fp8_block(first, 0, 1, 16, scale, products, 0);
    for (int i = 0; i < 16; i++) lows[i] = (uint8_t)products[i], highs[i] = (uint8_t)(products[i] >> 8);
    const __m512i low_bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lows));
    const __m512i high_bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)highs));

    const __m512i zero = _mm512_setzero_si512(), eight = _mm512_set1_epi8(8), nan = _mm512_set1_epi8(0x7F);
    const __m512i sign_and_exponent = _mm512_set1_epi16((short)0x8780);
    const __m512i first_half = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second_half = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (size_t row = 0; row < n; row++, x += stride, out += out_stride) {
        __mmask64 nans = 0;
        for (size_t j = 0; j < simd; j += 64) {
            __m512i v = _mm512_loadu_si512(x + j);
            __m512i magnitude = _mm512_and_si512(v, nan);
            nans |= _mm512_cmpeq_epi8_mask(magnitude, nan);
            /* The byte itself up to 15, else 8 + its mantissa. */
            __m512i normal = _mm512_and_si512(_mm512_min_epu8(magnitude, eight), eight);
            __m512i index = _mm512_or_si512(normal, _mm512_and_si512(magnitude, _mm512_set1_epi8(7)));
            __m512i low = _mm512_shuffle_epi8(low_bytes, index), high = _mm512_shuffle_epi8(high_bytes, index);
            /* Binades above the first, where bf16 has its exponent, and the sign. */
            __m512i above = _mm512_or_si512(_mm512_subs_epu8(magnitude, eight), _mm512_andnot_si512(nan, v));
            __m512i above0 = _mm512_srai_epi16(_mm512_unpacklo_epi8(zero, above), 4);
            __m512i above1 = _mm512_srai_epi16(_mm512_unpackhi_epi8(zero, above), 4);
            __m512i out0 =
                _mm512_add_epi16(_mm512_unpacklo_epi8(low, high), _mm512_and_si512(above0, sign_and_exponent));
            __m512i out1 =
                _mm512_add_epi16(_mm512_unpackhi_epi8(low, high), _mm512_and_si512(above1, sign_and_exponent));
            _mm512_storeu_si512(out + j, _mm512_permutex2var_epi64(out0, first_half, out1));
            _mm512_storeu_si512(out + j + 32, _mm512_permutex2var_epi64(out0, second_half, out1));
        }
        size_t done = nans ? 0 : simd;
        if (done < k) ktq_avx2_fp8_block(x + done, 0, 1, k - done, scale, out + done, 0);
    }
}

uint8_t ktq_avx512_fp8_amax(const uint8_t *x, size_t count) {
    const __m512i mask = _mm512_set1_epi8(0x7F);
    __m512i top = _mm512_setzero_si512();
    size_t i = 0;
    for (; i + 64 <= count; i += 64) top = _mm512_max_epu8(top, _mm512_and_si512(mask, _mm512_loadu_si512(x + i)));
    uint8_t tops[64];
    _mm512_storeu_si512(tops, top);
    uint8_t most = ktq_avx2_fp8_amax(tops, 64), rest = ktq_avx2_fp8_amax(x + i, count - i);
    return rest > most ? rest : most;
}

/* Of the speed of memory with AVX2 already. */
void ktq_avx512_f16_row(const uint16_t *x, size_t count, uint16_t *out) { ktq_avx2_f16_row(x, count, out); }

void ktq_avx512_f32_row(const float *x, size_t count, uint16_t *out) { ktq_avx2_f32_row(x, count, out); }

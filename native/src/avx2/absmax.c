/* Absmax quantisation with AVX2: two passes over a row, which stays in L1 or L2 between them. */
#include <immintrin.h>

#include "../scalar/absmax.h"
#include "../table.h"
#include "widen.h"

/* Rounds 8-bit codes to a multiple of 16, half away from zero, and divides by 16. */
static inline __m256i nibbles16(__m256i codes) {
    __m256i magnitude = _mm256_srli_epi16(_mm256_add_epi16(_mm256_abs_epi16(codes), _mm256_set1_epi16(8)), 4);
    return _mm256_sign_epi16(magnitude, codes);
}

uint16_t ktq_avx2_bf16_amax(const uint16_t *w, size_t k) {
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    __m256i top0 = _mm256_setzero_si256(), top1 = top0;
    size_t j = 0;
    for (; j + 32 <= k; j += 32) {
        top0 = _mm256_max_epu16(top0, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(w + j))));
        top1 = _mm256_max_epu16(top1, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(w + j + 16))));
    }
    top0 = _mm256_max_epu16(top0, top1);
    __m128i top = _mm_max_epu16(_mm256_castsi256_si128(top0), _mm256_extracti128_si256(top0, 1));
    /* minpos finds the smallest of eight; the complement turns that into the largest. */
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(top, _mm_set1_epi16(-1)));
    uint16_t amax = (uint16_t)~_mm_extract_epi16(least, 0);
    for (; j < k; j++) {
        uint16_t magnitude = w[j] & 0x7FFFu;
        if (magnitude > amax) amax = magnitude;
    }
    return amax;
}

void ktq_avx2_codes_i8(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const __m256 inv = _mm256_set1_ps(inverse);
    size_t j = 0;
    for (; j + 32 <= k; j += 32) ktq_store32(codes + j, ktq_codes16(w + j, inv), ktq_codes16(w + j + 16, inv));
    ktq_scalar_codes_i8(w + j, k - j, inverse, codes + j);
}

void ktq_avx2_codes_i4(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const __m256 inv = _mm256_set1_ps(inverse);
    size_t j = 0;
    for (; j + 32 <= k; j += 32)
        ktq_store32(codes + j, nibbles16(ktq_codes16(w + j, inv)), nibbles16(ktq_codes16(w + j + 16, inv)));
    ktq_scalar_codes_i4(w + j, k - j, inverse, codes + j);
}

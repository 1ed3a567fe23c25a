/* bf16 weights to codes, sixteen at a time. */
#ifndef KTQ_AVX2_WIDEN_H
#define KTQ_AVX2_WIDEN_H

#include <immintrin.h>
#include <stdint.h>

/* Interleaving with zeros both widens a bf16 to float32 and leaves the two halves just as packs wants them back. */
static inline __m256 ktq_widen_lo(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), v));
}

static inline __m256 ktq_widen_hi(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), v));
}

/* rint(w * inverse) of sixteen weights as int16, saturated, in their own order. */
static inline __m256i ktq_codes16(const uint16_t *w, __m256 inverse) {
    __m256i v = _mm256_loadu_si256((const __m256i *)w);
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(ktq_widen_lo(v), inverse)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(ktq_widen_hi(v), inverse)));
}

/* Two times sixteen int16 as 32 saturated bytes. */
static inline void ktq_store32(int8_t *out, __m256i first, __m256i second) {
    __m256i bytes = _mm256_packs_epi16(first, second);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(bytes, _MM_SHUFFLE(3, 1, 2, 0)));
}

#endif

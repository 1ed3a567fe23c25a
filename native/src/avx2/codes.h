/* bf16 weights to codes, in registers. */
#ifndef KTQ_AVX2_CODES_H
#define KTQ_AVX2_CODES_H

#include <immintrin.h>

#include "../api.h"

/* Signed saturation of rint(w * inverse) for 16 weights, in their own order: interleaving with zeros both widens a
 * bf16 to float32 and leaves the two halves just as packs wants them back. */
static inline __m256i codes16(const uint16_t *w, __m256 inverse) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i v = _mm256_loadu_si256((const __m256i *)w);
    __m256 lo = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, v));
    __m256 hi = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, v));
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(lo, inverse)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(hi, inverse)));
}

#endif

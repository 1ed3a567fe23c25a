/* bf16 weights to codes, in registers. */
#ifndef KTQ_AVX512_CODES_H
#define KTQ_AVX512_CODES_H

#include <immintrin.h>

#include "../api.h"

/* Signed saturation of rint(w * inverse) for 32 weights in their own order; see the avx2 folder. */
static inline __m512i codes32(const uint16_t *w, __m512 inverse) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i v = _mm512_loadu_si512(w);
    __m512 lo = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, v));
    __m512 hi = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, v));
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(lo, inverse)),
                              _mm512_cvtps_epi32(_mm512_mul_ps(hi, inverse)));
}

#endif

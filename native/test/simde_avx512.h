/* Included ahead of the avx512 folder's sources, to compile them for a CPU without AVX-512: simde
 * (https://github.com/simd-everywhere/simde) stands in for the intrinsics. Needs AVX2. */
#ifndef KTQ_SIMDE_AVX512_H
#define KTQ_SIMDE_AVX512_H

#include <immintrin.h>
#include <math.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

/* The one that simde 0.7.4 lacks; the sources never pass it what does not fit an int. */
static inline simde__m512i ktq_simde_cvtps_epi32(simde__m512 a) {
    simde__m512_private x = simde__m512_to_private(a);
    simde__m512i_private r;
    for (int i = 0; i < 16; i++) r.i32[i] = (int)nearbyintf(x.f32[i]);
    return simde__m512i_from_private(r);
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 ktq_simde_cvtps_epi32

#endif

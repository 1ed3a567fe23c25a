/* Absmax quantisation with AVX-512: two passes over a row, which stays in L1 or L2 between them. */
#include "../scalar/absmax.h"
#include "../table.h"
#include "codes.h"

/* 16-bit codes rounded to a multiple of 16, half away from zero, and divided by 16. */
static inline __m512i nibbles32(__m512i codes) {
    __m512i raised = _mm512_add_epi16(_mm512_add_epi16(codes, _mm512_set1_epi16(8)), _mm512_srai_epi16(codes, 15));
    return _mm512_srai_epi16(raised, 4);
}

static inline void store32(int8_t *out, __m512i codes) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtsepi16_epi8(codes));
}

uint16_t ktq_avx512_bf16_amax(const uint16_t *w, size_t k) {
    const __m512i mask = _mm512_set1_epi16(0x7FFF);
    __m512i top = _mm512_setzero_si512();
    size_t j = 0;
    for (; j + 32 <= k; j += 32) top = _mm512_max_epu16(top, _mm512_and_si512(mask, _mm512_loadu_si512(w + j)));
    uint16_t tops[32];
    _mm512_storeu_si512(tops, top);
    uint16_t most = ktq_avx2_bf16_amax(tops, 32), rest = ktq_avx2_bf16_amax(w + j, k - j);
    return rest > most ? rest : most;
}

int ktq_avx512_absmax_i8(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                         struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_avx512_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i8(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        size_t j = 0;
        if (isfinite(inverse)) { /* otherwise products may be infinite or NaN, and cvtps knows no clamp */
            const __m512 inv = _mm512_set1_ps(inverse);
            for (; j + 32 <= k; j += 32) store32(codes + j, codes32(w + j, inv));
        }
        for (; j < k; j++) codes[j] = (int8_t)ktq_code_i8(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

int ktq_avx512_absmax_i4(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                         struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_avx512_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i4(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        size_t j = 0;
        if (isfinite(inverse)) {
            const __m512 inv = _mm512_set1_ps(inverse);
            for (; j + 32 <= k; j += 32) store32(codes + j, nibbles32(codes32(w + j, inv)));
        }
        for (; j < k; j++) codes[j] = (int8_t)ktq_code_i4(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

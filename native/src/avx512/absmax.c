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

void ktq_avx512_codes_i8(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const __m512 inv = _mm512_set1_ps(inverse);
    size_t j = 0;
    for (; j + 32 <= k; j += 32) store32(codes + j, codes32(w + j, inv));
    ktq_scalar_codes_i8(w + j, k - j, inverse, codes + j);
}

void ktq_avx512_codes_i4(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const __m512 inv = _mm512_set1_ps(inverse);
    size_t j = 0;
    for (; j + 32 <= k; j += 32) store32(codes + j, nibbles32(codes32(w + j, inv)));
    ktq_scalar_codes_i4(w + j, k - j, inverse, codes + j);
}

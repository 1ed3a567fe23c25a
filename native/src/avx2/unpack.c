/* Codes of 4 bits to bf16 with AVX2: 16 codes at a time, the rest by the scalar code. */
#include <immintrin.h>

#include "../table.h"

enum { RUN = 64 };

/* What 8 codes in 32-bit lanes stand for; bit 3 chooses between the halves of the table. */
static inline __m256 look_up8(__m256i codes, __m256 low, __m256 high) {
    __m256 upper_half = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper_half);
}

void ktq_avx2_nibble_row(const uint8_t *x, size_t count, const float *values, float scale, uint16_t *out) {
    const __m256 s = _mm256_set1_ps(scale);
    const __m256 low = _mm256_loadu_ps(values), high = _mm256_loadu_ps(values + 8);
    const __m128i mask = _mm_set1_epi8(0x0F);
    float run[RUN];
    size_t i = 0;
    while (i + 16 <= count) {
        size_t filled = 0;
        for (; filled < RUN && i + filled + 16 <= count; filled += 16) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(x + (i + filled) / 2));
            __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
            __m128i codes = _mm_unpacklo_epi8(even, odd);
            __m256 first = look_up8(_mm256_cvtepu8_epi32(codes), low, high);
            __m256 second = look_up8(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)), low, high);
            _mm256_storeu_ps(run + filled, _mm256_mul_ps(first, s));
            _mm256_storeu_ps(run + filled + 8, _mm256_mul_ps(second, s));
        }
        ktq_avx2_f32_row(run, filled, out + i);
        i += filled;
    }
    ktq_scalar_nibble_row(x + i / 2, count - i, values, scale, out + i);
}

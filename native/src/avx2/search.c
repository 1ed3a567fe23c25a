/* What a search asks for each candidate scale, four of them in one pass: eight lanes each. */
#include <immintrin.h>

#include "../table.h"

enum { TOGETHER = 4 };

static inline float tree(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline __attribute__((always_inline)) void sums_of(const float *m, const float *h, size_t count,
                                                          const float *inverse, const int together, float most,
                                                          float *sums) {
    const __m256 top = _mm256_set1_ps(most);
    __m256 n[TOGETHER], d[TOGETHER], scale[TOGETHER];
    for (int i = 0; i < together; i++) {
        n[i] = d[i] = _mm256_setzero_ps();
        scale[i] = _mm256_set1_ps(inverse[i]);
    }
    for (size_t j = 0; j < count; j += 8) {
        const __m256 weight = _mm256_loadu_ps(h + j), magnitude = _mm256_loadu_ps(m + j);
        for (int i = 0; i < together; i++) {
            const __m256 x = _mm256_min_ps(_mm256_mul_ps(magnitude, scale[i]), top);
            const __m256 q = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            const __m256 hq = _mm256_mul_ps(weight, q);
            n[i] = _mm256_add_ps(n[i], _mm256_mul_ps(hq, magnitude));
            d[i] = _mm256_add_ps(d[i], _mm256_mul_ps(hq, q));
        }
    }
    for (int i = 0; i < together; i++) {
        sums[2 * i] = tree(n[i]);
        sums[2 * i + 1] = tree(d[i]);
    }
}

void ktq_avx2_search_sums(const float *m, const float *h, size_t count, const float *inverse, size_t candidates,
                          float most, float *sums) {
    size_t i = 0;
    for (; i + TOGETHER <= candidates; i += TOGETHER) sums_of(m, h, count, inverse + i, TOGETHER, most, sums + 2 * i);
    for (; i < candidates; i++) sums_of(m, h, count, inverse + i, 1, most, sums + 2 * i);
}

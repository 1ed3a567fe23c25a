/* The eight lanes of the scalar code in two vectors of doubles each. */
#include "../scalar/difference.h"

#include <immintrin.h>

typedef struct sums4 {
    __m256d first, second, product, square, largest;
} sums4;

static inline __m256 widen8(const uint16_t *w) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)), 16));
}

static inline void add4(__m256d x, __m256d y, sums4 *sums) {
    const __m256d apart = _mm256_sub_pd(x, y), size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), apart);
    sums->first = _mm256_add_pd(sums->first, _mm256_mul_pd(x, x));
    sums->second = _mm256_add_pd(sums->second, _mm256_mul_pd(y, y));
    sums->product = _mm256_add_pd(sums->product, _mm256_mul_pd(x, y));
    sums->square = _mm256_add_pd(sums->square, _mm256_mul_pd(apart, apart));
    sums->largest = _mm256_max_pd(size, sums->largest); /* the second where either is NaN */
}

void ktq_avx2_difference(const uint16_t *a, const uint16_t *b, size_t count, struct ktq_difference *total) {
    sums4 low = {0}, high = {0};
    size_t i = 0;
    for (; i + KTQ_LANES <= count; i += KTQ_LANES) {
        const __m256 x = widen8(a + i), y = widen8(b + i);
        add4(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_castps256_ps128(y)), &low);
        add4(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)), _mm256_cvtps_pd(_mm256_extractf128_ps(y, 1)), &high);
    }
    ktq_lanes sums;
    _mm256_storeu_pd(sums.first, low.first), _mm256_storeu_pd(sums.first + 4, high.first);
    _mm256_storeu_pd(sums.second, low.second), _mm256_storeu_pd(sums.second + 4, high.second);
    _mm256_storeu_pd(sums.product, low.product), _mm256_storeu_pd(sums.product + 4, high.product);
    _mm256_storeu_pd(sums.square, low.square), _mm256_storeu_pd(sums.square + 4, high.square);
    _mm256_storeu_pd(sums.largest, low.largest), _mm256_storeu_pd(sums.largest + 4, high.largest);
    ktq_difference_end(a + i, b + i, count - i, &sums, total);
}

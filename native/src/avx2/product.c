/* Products of matrices with AVX2: four rows of c and two registers of its columns at a time. */
#include <immintrin.h>

#include "../table.h"

enum { DEEP = 256, ROWS = 4 };

/* b is copied into panels of two registers' width, DEEP rows each: it is gone through once for every four rows of c.
 * What is left over at the sides is made number by number. */
#define KTQ_PRODUCT(name, real, vector, lanes, load, store, set1, mul, add)                                           \
    void ktq_avx2_##name(const real *a, size_t a_row, size_t a_col, const real *b, size_t b_row, real *c,             \
                         size_t c_row, size_t m, size_t k, size_t n) {                                                \
        real panel[DEEP * 2 * lanes];                                                                                 \
        for (size_t p0 = 0; p0 < k; p0 += DEEP) {                                                                     \
            const size_t deep = k - p0 < DEEP ? k - p0 : DEEP;                                                        \
            size_t j = 0;                                                                                             \
            for (; j + 2 * lanes <= n; j += 2 * lanes) {                                                              \
                for (size_t p = 0; p < deep; p++) {                                                                   \
                    store(panel + p * 2 * lanes, load(b + (p0 + p) * b_row + j));                                     \
                    store(panel + p * 2 * lanes + lanes, load(b + (p0 + p) * b_row + j + lanes));                     \
                }                                                                                                     \
                size_t i = 0;                                                                                         \
                for (; i + ROWS <= m; i += ROWS) {                                                                    \
                    vector sum[ROWS][2];                                                                              \
                    for (int r = 0; r < ROWS; r++) {                                                                  \
                        sum[r][0] = load(c + (i + r) * c_row + j);                                                    \
                        sum[r][1] = load(c + (i + r) * c_row + j + lanes);                                            \
                    }                                                                                                 \
                    for (size_t p = 0; p < deep; p++) {                                                               \
                        const vector left = load(panel + p * 2 * lanes), right = load(panel + p * 2 * lanes + lanes); \
                        for (int r = 0; r < ROWS; r++) {                                                              \
                            const vector factor = set1(a[(i + r) * a_row + (p0 + p) * a_col]);                        \
                            sum[r][0] = add(sum[r][0], mul(factor, left));                                            \
                            sum[r][1] = add(sum[r][1], mul(factor, right));                                           \
                        }                                                                                             \
                    }                                                                                                 \
                    for (int r = 0; r < ROWS; r++) {                                                                  \
                        store(c + (i + r) * c_row + j, sum[r][0]);                                                    \
                        store(c + (i + r) * c_row + j + lanes, sum[r][1]);                                            \
                    }                                                                                                 \
                }                                                                                                     \
                for (; i < m; i++) {                                                                                  \
                    vector left = load(c + i * c_row + j), right = load(c + i * c_row + j + lanes);                   \
                    for (size_t p = 0; p < deep; p++) {                                                               \
                        const vector factor = set1(a[i * a_row + (p0 + p) * a_col]);                                  \
                        left = add(left, mul(factor, load(panel + p * 2 * lanes)));                                   \
                        right = add(right, mul(factor, load(panel + p * 2 * lanes + lanes)));                         \
                    }                                                                                                 \
                    store(c + i * c_row + j, left);                                                                   \
                    store(c + i * c_row + j + lanes, right);                                                          \
                }                                                                                                     \
            }                                                                                                         \
            for (size_t i = 0; j < n && i < m; i++)                                                                   \
                for (size_t p = 0; p < deep; p++) {                                                                   \
                    const real factor = a[i * a_row + (p0 + p) * a_col];                                              \
                    for (size_t q = j; q < n; q++) c[i * c_row + q] += factor * b[(p0 + p) * b_row + q];              \
                }                                                                                                     \
        }                                                                                                             \
    }

KTQ_PRODUCT(product, float, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_mul_ps, _mm256_add_ps)
KTQ_PRODUCT(product_double, double, __m256d, 4, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_set1_pd, _mm256_mul_pd,
            _mm256_add_pd)

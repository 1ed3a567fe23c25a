/* Products of matrices whose sums have one order. */
#include "../table.h"

#define KTQ_PRODUCT(name, real)                                                                                       \
    void ktq_scalar_##name(const real *a, size_t a_row, size_t a_col, const real *b, size_t b_row, real *c,           \
                           size_t c_row, size_t m, size_t k, size_t n) {                                              \
        for (size_t i = 0; i < m; i++)                                                                                \
            for (size_t p = 0; p < k; p++) {                                                                          \
                const real factor = a[i * a_row + p * a_col];                                                         \
                for (size_t j = 0; j < n; j++) c[i * c_row + j] += factor * b[p * b_row + j];                         \
            }                                                                                                         \
    }

KTQ_PRODUCT(product, float)
KTQ_PRODUCT(product_double, double)

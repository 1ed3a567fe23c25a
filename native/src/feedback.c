/* Second moments, and codes with error feedback. */
#include "feedback.h"

#include <string.h>

#include "scalar/absmax.h"

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ---- the factor: L of the moments with both axes turned round, its inverse, turned round again. With H' = L L' and P
 * the turning, U = P L^-1 P is upper triangular and U'U the inverse of H. */

static int factor_diagonal(double *a, size_t k, size_t first, size_t size) {
    for (size_t j = first; j < first + size; j++) {
        for (size_t p = first; p < j; p++) a[j * k + j] -= a[j * k + p] * a[j * k + p];
        if (!(a[j * k + j] > 0) || !isfinite(a[j * k + j])) return KTQ_NOT_FINITE;
        a[j * k + j] = sqrt(a[j * k + j]);
        for (size_t i = j + 1; i < k; i++) {
            for (size_t p = first; p < j; p++) a[i * k + j] -= a[i * k + p] * a[j * k + p];
            a[i * k + j] /= a[j * k + j];
        }
    }
    return KTQ_OK;
}

static int cholesky(const ktq_table *isa, double *a, size_t k, double *side) {
    for (size_t b = 0; b < k; b += KTQ_BLOCK) {
        const size_t size = least(KTQ_BLOCK, k - b), rest = b + size;
        const int status = factor_diagonal(a, k, b, size);
        if (status != KTQ_OK) return status;
        for (size_t p = 0; p < size; p++)
            for (size_t i = rest; i < k; i++) side[p * k + i] = -a[i * k + b + p];
        for (size_t i = rest; i < k; i += KTQ_BLOCK) {
            const size_t rows = least(KTQ_BLOCK, k - i);
            isa->product_double(a + i * k + b, k, 1, side + rest, k, a + i * k + rest, k, rows, size, i + rows - rest);
        }
    }
    return KTQ_OK;
}

/* Block row by block row: L M = 1 gives M_b = L_bb^-1 (1_b - sum of L_bp M_p). */
static void invert_lower(const ktq_table *isa, double *a, size_t k, double *side) {
    double *rows = side, *sums = side + KTQ_BLOCK * k;
    for (size_t b = 0; b < k; b += KTQ_BLOCK) {
        const size_t size = least(KTQ_BLOCK, k - b);
        for (size_t i = 0; i < size; i++) {
            for (size_t j = 0; j < b + size; j++) rows[i * k + j] = -a[(b + i) * k + j];
            memset(sums + i * k, 0, (b + size) * sizeof *sums);
            sums[i * k + b + i] = 1;
        }
        isa->product_double(rows, k, 1, a, k, sums, k, size, b, b);
        for (size_t i = 0; i < size; i++) {
            const double pivot = -rows[i * k + b + i];
            for (size_t p = 0; p < i; p++)
                for (size_t j = 0; j < b + size; j++)
                    sums[i * k + j] += rows[i * k + b + p] * a[(b + p) * k + j];
            for (size_t j = 0; j < b + size; j++) a[(b + i) * k + j] = sums[i * k + j] / pivot;
        }
    }
}

int ktq_factor_with(const ktq_table *isa, float *h, size_t k, double damping, double *room) {
    double *side = room + k * k, mean = 0;
    for (size_t i = 0; i < k; i++) mean += h[i * k + i];
    mean /= (double)k;
    if (!(mean > 0) || !isfinite(mean)) return KTQ_NOT_FINITE;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            room[i * k + j] = j > i ? 0 : (double)h[(k - 1 - i) * k + k - 1 - j] + (i == j ? damping * mean : 0);
    const int status = cholesky(isa, room, k, side);
    if (status != KTQ_OK) return status;
    invert_lower(isa, room, k, side);
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++) h[i * k + j] = j < i ? 0.0f : (float)room[(k - 1 - i) * k + k - 1 - j];
    return KTQ_OK;
}

/* ---- the codes. Within a block of columns an error is spread at once, over all behind it by one product: each weight
 * is changed by the errors before it in their order, so the block's size changes nothing. */

void ktq_feedback_rows(const ktq_table *isa, const uint16_t *w, size_t n, size_t stride, const ktq_feedback_how *how,
                       const float *scales, float *room, int8_t *codes) {
    const size_t k = how->k;
    float *weights = room, *errors = room + KTQ_ROWS * k;
    for (size_t r = 0; r < n; r++)
        for (size_t j = 0; j < k; j++) weights[r * k + j] = ktq_f32_of_bf16(w[r * stride + how->order[j]]);
    for (size_t b = 0; b < k; b += KTQ_BLOCK) {
        const size_t size = least(KTQ_BLOCK, k - b), rest = b + size;
        for (size_t r = 0; r < n; r++)
            for (size_t j = b; j < rest; j++) {
                const size_t column = how->order[j];
                const float scale = scales[r * how->groups + column / how->group] * how->step;
                const float *spread = how->factor + j * k;
                float *row = weights + r * k;
                float code = rintf(row[j] * ktq_inverse(scale));
                code = !(code < how->most) ? how->most : code < -how->most ? -how->most : code;
                codes[r * k + column] = (int8_t)code;
                const float error = -((row[j] - code * scale) / spread[j]);
                errors[r * KTQ_BLOCK + j - b] = error;
                for (size_t c = j + 1; c < rest; c++) row[c] += error * spread[c];
            }
        isa->product(errors, KTQ_BLOCK, 1, how->factor + b * k + rest, k, weights + rest, k, n, size, k - rest);
    }
}

/* ---- the exponential, with an error of some 1e-13: 2^n times a polynomial on -ln(2)/2 to ln(2)/2. No library's own, as
 * these differ in the last bits. */
double ktq_exp(double x) {
    if (!(x > -700)) return 0;
    if (x > 700) x = 700;
    const double n = rint(x * 1.4426950408889634);
    const double r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    double sum = 1;
    for (int i = 12; i > 0; i--) sum = 1 + sum * r / i;
    return ldexp(sum, (int)n);
}

/* The per-row rules that every instruction set shares, so that none can state them differently. */
#ifndef KTQ_ABSMAX_H
#define KTQ_ABSMAX_H

#include <math.h>
#include <string.h>

#include "../api.h"

#define KTQ_BF16_INF 0x7F80u

static inline float ktq_f32_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ktq_bits_of_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ktq_f32_of_bf16(uint16_t bits) { return ktq_f32_of_bits((uint32_t)bits << 16); }

/* The scale of a row of 8 or 4 bits. For 8, upstream divides by 127 in float, but is built with -ffast-math, which makes
 * that a product with the rounded 1/127: another last bit in one row of twenty. For 4 it divides in double, which stays
 * a division. */
static inline float ktq_row_scale(uint16_t amax_bits, int bits) {
    const float amax = ktq_f32_of_bf16(amax_bits);
    return bits == 8 ? amax * (1.0f / 127.0f) : (float)((double)amax / 112.0);
}

static inline float ktq_inverse(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }

/* inverse is infinite only where the row's largest weight is below 2^-121: then a product may be infinite, which
 * clamps, or 0 * inf = NaN, which is the code of zero. No other row comes to a clamp. -128 is never a code, nor -8 of 4
 * bits: some of upstream's kernels cannot negate it (docs/formats/kt-amx.md). */
static inline int ktq_code_i8(float w, float inverse) {
    float x = w * inverse;
    if (isnan(x)) return 0;
    if (x > 127.0f) x = 127.0f;
    if (x < -127.0f) x = -127.0f;
    return (int)rintf(x);
}

/* The 8-bit code, rounded to a multiple of 16, half away from zero, then divided by 16. */
static inline int ktq_code_i4(float w, float inverse) {
    int code = ktq_code_i8(w, inverse);
    int nibble = ((code < 0 ? -code : code) + 8) >> 4;
    if (nibble > 7) nibble = 7;
    return code < 0 ? -nibble : nibble;
}

/* Names the first weight of a row that is not finite. */
static inline int ktq_not_finite(const uint16_t *w, size_t k, size_t row, struct ktq_where *where) {
    where->row = row;
    where->col = 0;
    while (where->col + 1 < k && (w[where->col] & 0x7FFFu) < KTQ_BF16_INF) where->col++;
    return KTQ_NOT_FINITE;
}

#endif

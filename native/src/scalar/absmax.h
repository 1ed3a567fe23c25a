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

/* A row of nothing but minus zeros keeps its sign in the scale: the golden files do. */
static inline float ktq_row_absmax(const uint16_t *w, size_t k, uint16_t amax_bits) {
    if (amax_bits == 0) {
        size_t j = 0;
        while (j < k && w[j] == 0x8000u) j++;
        return k != 0 && j == k ? -0.0f : 0.0f;
    }
    return ktq_f32_of_bf16(amax_bits);
}

static inline float ktq_scale_i8(float amax) { return amax / 127.0f; }

/* Upstream divides in double here and in float for 8 bits. */
static inline float ktq_scale_i4(float amax) { return (float)((double)amax / 112.0); }

static inline float ktq_inverse(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }

/* inverse is infinite only where the row's largest weight is below 2^-121: then a product may be infinite, which
 * clamps, or 0 * inf = NaN, which is the code of zero. */
static inline int ktq_code_i8(float w, float inverse) {
    float x = w * inverse;
    if (isnan(x)) return 0;
    if (x > 127.0f) x = 127.0f;
    if (x < -128.0f) x = -128.0f;
    return (int)rintf(x);
}

/* The 8-bit code, rounded to a multiple of 16, half away from zero, then divided by 16. */
static inline int ktq_code_i4(float w, float inverse) {
    int code = ktq_code_i8(w, inverse);
    int nibble = ((code < 0 ? -code : code) + 8) >> 4;
    if (code < 0) return -nibble;
    return nibble > 7 ? 7 : nibble;
}

/* Names the first weight of a row that is not finite. */
static inline int ktq_not_finite(const uint16_t *w, size_t k, size_t row, struct ktq_where *where) {
    where->row = row;
    where->col = 0;
    while (where->col + 1 < k && (w[where->col] & 0x7FFFu) < KTQ_BF16_INF) where->col++;
    return KTQ_NOT_FINITE;
}

#endif

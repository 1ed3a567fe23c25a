/* Single values to bf16, by the rules that every instruction set keeps. */
#ifndef KTQ_TO_BF16_H
#define KTQ_TO_BF16_H

#include "absmax.h"

static inline uint16_t ktq_bf16_of_f32(float value) {
    uint32_t bits = ktq_bits_of_f32(value);
    if (isnan(value)) return (uint16_t)(bits >> 16 | 0x0040u); /* quiet, and never rounded to infinity */
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* e4m3fn: bias 7, no infinity, NaN only at 0x7F and 0xFF. Its exponent and mantissa, moved to those of a float32,
 * stand for the value times 2^-120 (the biases differ by 120): one exact product mends that, subnormals included. */
static inline float ktq_f32_of_fp8(uint8_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x80u) << 24;
    if ((bits & 0x7Fu) == 0x7Fu) return ktq_f32_of_bits(sign | 0x7FC00000u);
    return ktq_f32_of_bits(sign | (uint32_t)(bits & 0x7Fu) << 20) * 0x1p120f;
}

#endif

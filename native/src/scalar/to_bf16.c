/* Other float formats to bf16, rounded to nearest, ties to even. */
#include "absmax.h"

#include "../table.h"

/* e4m3fn: bias 7, no infinity, NaN only at 0x7F and 0xFF. Its exponent and mantissa, moved to those of a float32,
 * stand for the value times 2^-120 (the biases differ by 120): one exact product mends that, subnormals included. */
static float f32_of_fp8(uint8_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x80u) << 24;
    if ((bits & 0x7Fu) == 0x7Fu) return ktq_f32_of_bits(sign | 0x7FC00000u);
    return ktq_f32_of_bits(sign | (uint32_t)(bits & 0x7Fu) << 20) * 0x1p120f;
}

/* The same idea: bias 15 against 127. Infinity and NaN keep their all-ones exponent. */
static float f32_of_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t rest = (uint32_t)(bits & 0x7FFFu) << 13;
    if ((bits & 0x7C00u) == 0x7C00u) return ktq_f32_of_bits(sign | rest | 0x7F800000u);
    return ktq_f32_of_bits(sign | rest) * 0x1p112f;
}

void ktq_scalar_fp8_row(const uint8_t *x, size_t count, float scale, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = ktq_bf16_of_f32(f32_of_fp8(x[i]) * scale);
}

void ktq_scalar_f16_row(const uint16_t *x, size_t count, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = ktq_bf16_of_f32(f32_of_f16(x[i]));
}

void ktq_scalar_f32_row(const float *x, size_t count, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = ktq_bf16_of_f32(x[i]);
}

/* Other float formats to bf16, rounded to nearest, ties to even. */
#include "../table.h"
#include "to_bf16.h"

/* The idea of ktq_f32_of_fp8: bias 15 against 127. Infinity and NaN keep their all-ones exponent. */
static float f32_of_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t rest = (uint32_t)(bits & 0x7FFFu) << 13;
    if ((bits & 0x7C00u) == 0x7C00u) return ktq_f32_of_bits(sign | rest | 0x7F800000u);
    return ktq_f32_of_bits(sign | rest) * 0x1p112f;
}

void ktq_scalar_fp8_block(const uint8_t *x, size_t stride, size_t n, size_t k, float scale, uint16_t *out,
                          size_t out_stride) {
    for (size_t i = 0; i < n; i++, x += stride, out += out_stride)
        for (size_t j = 0; j < k; j++) out[j] = ktq_bf16_of_f32(ktq_f32_of_fp8(x[j]) * scale);
}

uint8_t ktq_scalar_fp8_amax(const uint8_t *x, size_t count) {
    uint8_t amax = 0;
    for (size_t i = 0; i < count; i++)
        if ((x[i] & 0x7Fu) > amax) amax = x[i] & 0x7Fu;
    return amax;
}

void ktq_scalar_f16_row(const uint16_t *x, size_t count, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = ktq_bf16_of_f32(f32_of_f16(x[i]));
}

void ktq_scalar_f32_row(const float *x, size_t count, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = ktq_bf16_of_f32(x[i]);
}

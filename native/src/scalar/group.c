/* Quantisation of one group, and the storage of its codes two a byte. */
#include "group.h"

int ktq_scalar_group(const uint16_t *w, size_t count, const ktq_grid *grid, int8_t *codes, float *scale, int8_t *zero) {
    float low = INFINITY, high = -INFINITY;
    for (size_t j = 0; j < count; j++) {
        float x = ktq_f32_of_bf16(w[j]);
        if (!isfinite(x)) return KTQ_NOT_FINITE;
        if (x < low) low = x;
        if (x > high) high = x;
    }
    ktq_step step = ktq_group_step(low, high, grid, scale);
    for (size_t j = 0; j < count; j++) codes[j] = ktq_group_code(ktq_f32_of_bf16(w[j]), &step);
    if (zero) *zero = (int8_t)step.zero;
    return KTQ_OK;
}

void ktq_scalar_nibbles_pack(const int8_t *codes, size_t count, uint8_t *out) {
    for (size_t i = 0; i < count / 2; i++)
        out[i] = (uint8_t)(((codes[2 * i] + 8) & 15) | ((codes[2 * i + 1] + 8) & 15) << 4);
}

void ktq_scalar_nibbles_unpack(const uint8_t *packed, size_t count, int8_t *codes) {
    for (size_t i = 0; i < count / 2; i++) {
        codes[2 * i] = (int8_t)((packed[i] & 15) - 8);
        codes[2 * i + 1] = (int8_t)((packed[i] >> 4) - 8);
    }
}

/* Absmax quantisation, one scale a row, written to be read. */
#include "absmax.h"

#include "../table.h"

uint16_t ktq_scalar_bf16_amax(const uint16_t *w, size_t k) {
    /* Without its sign a bf16 compares like its bits, and NaN and infinity come out on top. */
    uint16_t amax = 0;
    for (size_t j = 0; j < k; j++) {
        uint16_t magnitude = w[j] & 0x7FFFu;
        if (magnitude > amax) amax = magnitude;
    }
    return amax;
}

void ktq_scalar_codes_i8(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    for (size_t j = 0; j < k; j++) codes[j] = (int8_t)ktq_code_i8(ktq_f32_of_bf16(w[j]), inverse);
}

void ktq_scalar_codes_i4(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    for (size_t j = 0; j < k; j++) codes[j] = (int8_t)ktq_code_i4(ktq_f32_of_bf16(w[j]), inverse);
}

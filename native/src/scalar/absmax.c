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

int ktq_scalar_absmax_i8(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                         struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_scalar_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i8(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        for (size_t j = 0; j < k; j++) codes[j] = (int8_t)ktq_code_i8(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

int ktq_scalar_absmax_i4(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                         struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_scalar_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i4(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        for (size_t j = 0; j < k; j++) codes[j] = (int8_t)ktq_code_i4(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

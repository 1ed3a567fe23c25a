/* Absmax quantisation with NEON: two passes over a row, which stays in L1 or L2 between them. */
#include "../scalar/absmax.h"
#include "../table.h"
#include "codes.h"

uint16_t ktq_neon_bf16_amax(const uint16_t *w, size_t k) {
    const uint16x8_t mask = vdupq_n_u16(0x7FFF);
    uint16x8_t top0 = vdupq_n_u16(0), top1 = top0;
    size_t j = 0;
    for (; j + 16 <= k; j += 16) {
        top0 = vmaxq_u16(top0, vandq_u16(mask, vld1q_u16(w + j)));
        top1 = vmaxq_u16(top1, vandq_u16(mask, vld1q_u16(w + j + 8)));
    }
    uint16_t amax = vmaxvq_u16(vmaxq_u16(top0, top1)), rest = ktq_scalar_bf16_amax(w + j, k - j);
    return rest > amax ? rest : amax;
}

int ktq_neon_absmax_i8(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                       struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_neon_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i8(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        size_t j = 0;
        if (isfinite(inverse)) {
            const float32x4_t inv = vdupq_n_f32(inverse);
            for (; j + 16 <= k; j += 16) vst1q_s8(codes + j, codes16(w + j, inv));
        }
        for (; j < k; j++) codes[j] = (int8_t)ktq_code_i8(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

int ktq_neon_absmax_i4(const uint16_t *w, size_t n, size_t k, size_t stride, int8_t *codes, float *scales,
                       struct ktq_where *where) {
    for (size_t i = 0; i < n; i++, w += stride, codes += k) {
        uint16_t amax = ktq_neon_bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, i, where);
        scales[i] = ktq_scale_i4(ktq_row_absmax(w, k, amax));
        float inverse = ktq_inverse(scales[i]);
        size_t j = 0;
        if (isfinite(inverse)) {
            const float32x4_t inv = vdupq_n_f32(inverse);
            for (; j + 16 <= k; j += 16) vst1q_s8(codes + j, vshrq_n_s8(sixteens(codes16(w + j, inv)), 4));
        }
        for (; j < k; j++) codes[j] = (int8_t)ktq_code_i4(ktq_f32_of_bf16(w[j]), inverse);
    }
    return KTQ_OK;
}

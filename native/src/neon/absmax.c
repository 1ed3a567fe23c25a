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

void ktq_neon_codes_i8(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const float32x4_t inv = vdupq_n_f32(inverse);
    size_t j = 0;
    for (; j + 16 <= k; j += 16) vst1q_s8(codes + j, codes16(w + j, inv));
    ktq_scalar_codes_i8(w + j, k - j, inverse, codes + j);
}

void ktq_neon_codes_i4(const uint16_t *w, size_t k, float inverse, int8_t *codes) {
    const float32x4_t inv = vdupq_n_f32(inverse);
    size_t j = 0;
    for (; j + 16 <= k; j += 16) vst1q_s8(codes + j, vshrq_n_s8(sixteens(codes16(w + j, inv)), 4));
    ktq_scalar_codes_i4(w + j, k - j, inverse, codes + j);
}

/* bf16 weights to codes, in registers. */
#ifndef KTQ_NEON_CODES_H
#define KTQ_NEON_CODES_H

#include <arm_neon.h>

#include "../api.h"

/* Signed saturation of rint(w * inverse) for 8 weights; a bf16 above a zero is a float32. */
static inline int16x8_t codes8(const uint16_t *w, float32x4_t inverse) {
    const uint16x8_t zero = vdupq_n_u16(0);
    uint16x8_t v = vld1q_u16(w);
    float32x4_t lo = vreinterpretq_f32_u16(vzip1q_u16(zero, v)), hi = vreinterpretq_f32_u16(vzip2q_u16(zero, v));
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(lo, inverse))),
                        vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(hi, inverse))));
}

static inline int8x16_t codes16(const uint16_t *w, float32x4_t inverse) {
    return vcombine_s8(vqmovn_s16(codes8(w, inverse)), vqmovn_s16(codes8(w + 8, inverse)));
}

/* Rounds codes to multiples of 16, half away from zero: 8 goes to 16, -8 to -16, 7 and -7 to 0. */
static inline int8x16_t sixteens(int8x16_t codes) {
    int8x16_t raised = vaddq_s8(vaddq_s8(codes, vdupq_n_s8(8)), vshrq_n_s8(codes, 7));
    return vandq_s8(raised, vdupq_n_s8((int8_t)0xF0));
}

#endif

/* Other float formats to bf16 with NEON. */
#include <arm_neon.h>
#include <math.h>

#include "../table.h"

/* Rounded to nearest even; a NaN is made quiet instead of rounded. */
static inline uint16x4_t round4(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

/* The method of the avx2 folder: 16 products to look up, each binade above repeats the upper eight. */
void ktq_neon_fp8_block(const uint8_t *x, size_t stride, size_t n, size_t k, float scale, uint16_t *out,
                        size_t out_stride) {
    const size_t simd = fabsf(scale) > 0x1p-100f && fabsf(scale) < 0x1p100f ? k / 16 * 16 : 0;
    static const uint8_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint16_t products[16];
    ktq_scalar_fp8_block(first, 0, 1, 16, scale, products, 0);
    const uint8x16x2_t bytes = vld2q_u8((const uint8_t *)products);

    const uint8x16_t zero = vdupq_n_u8(0), eight = vdupq_n_u8(8), nan = vdupq_n_u8(0x7F);
    const int16x8_t sign_and_exponent = vdupq_n_s16((int16_t)0x8780);
    for (size_t row = 0; row < n; row++, x += stride, out += out_stride) {
        uint8x16_t most = zero;
        for (size_t j = 0; j < simd; j += 16) {
            uint8x16_t v = vld1q_u8(x + j), magnitude = vandq_u8(v, nan);
            most = vmaxq_u8(most, magnitude);
            /* The byte itself up to 15, else 8 + its mantissa. */
            uint8x16_t normal = vandq_u8(vminq_u8(magnitude, eight), eight);
            uint8x16_t index = vorrq_u8(normal, vandq_u8(magnitude, vdupq_n_u8(7)));
            uint8x16_t low = vqtbl1q_u8(bytes.val[0], index), high = vqtbl1q_u8(bytes.val[1], index);
            /* Binades above the first, where bf16 has its exponent, and the sign. */
            uint8x16_t above = vorrq_u8(vqsubq_u8(magnitude, eight), vbicq_u8(v, nan));
            int16x8_t above0 = vshrq_n_s16(vreinterpretq_s16_u8(vzip1q_u8(zero, above)), 4);
            int16x8_t above1 = vshrq_n_s16(vreinterpretq_s16_u8(vzip2q_u8(zero, above)), 4);
            int16x8_t product0 = vreinterpretq_s16_u8(vzip1q_u8(low, high));
            int16x8_t product1 = vreinterpretq_s16_u8(vzip2q_u8(low, high));
            above0 = vaddq_s16(product0, vandq_s16(above0, sign_and_exponent));
            above1 = vaddq_s16(product1, vandq_s16(above1, sign_and_exponent));
            vst1q_u16(out + j, vreinterpretq_u16_s16(above0));
            vst1q_u16(out + j + 8, vreinterpretq_u16_s16(above1));
        }
        size_t done = vmaxvq_u8(most) == 0x7F ? 0 : simd;
        if (done < k) ktq_scalar_fp8_block(x + done, 0, 1, k - done, scale, out + done, 0);
    }
}

uint8_t ktq_neon_fp8_amax(const uint8_t *x, size_t count) {
    uint8x16_t top = vdupq_n_u8(0);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) top = vmaxq_u8(top, vandq_u8(vdupq_n_u8(0x7F), vld1q_u8(x + i)));
    uint8_t amax = vmaxvq_u8(top), rest = ktq_scalar_fp8_amax(x + i, count - i);
    return rest > amax ? rest : amax;
}

void ktq_neon_f16_row(const uint16_t *x, size_t count, uint16_t *out) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) vst1_u16(out + i, round4(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i)))));
    ktq_scalar_f16_row(x + i, count - i, out + i);
}

void ktq_neon_f32_row(const float *x, size_t count, uint16_t *out) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) vst1_u16(out + i, round4(vld1q_f32(x + i)));
    ktq_scalar_f32_row(x + i, count - i, out + i);
}

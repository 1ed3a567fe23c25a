/* Tiles of the AMX B-operand layout with NEON: sixteen transpositions of 4 x 4 words of 32 bits each. */
#include "../table.h"
#include "codes.h"

/* Transposes four rows of four words; word w of the rows goes to out + 64 * w bytes, a tile's word row. */
static inline void transpose4(const int8x16_t r[4], int8_t *out) {
    int32x4_t a = vreinterpretq_s32_s8(r[0]), b = vreinterpretq_s32_s8(r[1]);
    int32x4_t c = vreinterpretq_s32_s8(r[2]), d = vreinterpretq_s32_s8(r[3]);
    int64x2_t ab_lo = vreinterpretq_s64_s32(vzip1q_s32(a, b)), cd_lo = vreinterpretq_s64_s32(vzip1q_s32(c, d));
    int64x2_t ab_hi = vreinterpretq_s64_s32(vzip2q_s32(a, b)), cd_hi = vreinterpretq_s64_s32(vzip2q_s32(c, d));
    vst1q_s8(out, vreinterpretq_s8_s64(vzip1q_s64(ab_lo, cd_lo)));
    vst1q_s8(out + 64, vreinterpretq_s8_s64(vzip2q_s64(ab_lo, cd_lo)));
    vst1q_s8(out + 128, vreinterpretq_s8_s64(vzip1q_s64(ab_hi, cd_hi)));
    vst1q_s8(out + 192, vreinterpretq_s8_s64(vzip2q_s64(ab_hi, cd_hi)));
}

void ktq_neon_kt_amx_tile_i8(const int8_t *codes, size_t stride, int8_t *tile) {
    for (size_t row = 0; row < 16; row += 4)
        for (size_t col = 0; col < 64; col += 16) {
            int8x16_t r[4];
            for (size_t i = 0; i < 4; i++) r[i] = vld1q_s8(codes + (row + i) * stride + col);
            transpose4(r, tile + 16 * col + 4 * row);
        }
}

void ktq_neon_kt_amx_tile_i4(const int8_t *codes, size_t stride, int8_t *tile) {
    for (size_t row = 0; row < 16; row += 4)
        for (size_t col = 0; col < 64; col += 16) {
            int8x16_t r[4];
            for (size_t i = 0; i < 4; i++) {
                const int8_t *c = codes + (row + i) * stride + col;
                r[i] = vorrq_s8(vandq_s8(vld1q_s8(c), vdupq_n_s8(0x0F)), vshlq_n_s8(vld1q_s8(c + 64), 4));
            }
            transpose4(r, tile + 16 * col + 4 * row);
        }
}

void ktq_neon_kt_amx_panel_i8(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t tile = 0; tile < k; tile += 64, out += 2048)
        for (size_t row = 0; row < 16; row += 4)
            for (size_t col = 0; col < 64; col += 16) {
                int8x16_t r[4];
                for (size_t i = 0; i < 4; i++)
                    r[i] = codes16(w + (row + i) * stride + tile + col, vdupq_n_f32(inverse[row + i]));
                transpose4(r, out + 16 * col + 4 * row);
            }
}

void ktq_neon_kt_amx_panel_i4(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t tile = 0; tile < k; tile += 128, out += 2048)
        for (size_t row = 0; row < 16; row += 4)
            for (size_t col = 0; col < 64; col += 16) {
                int8x16_t r[4];
                for (size_t i = 0; i < 4; i++) {
                    const uint16_t *x = w + (row + i) * stride + tile + col;
                    const float32x4_t inv = vdupq_n_f32(inverse[row + i]);
                    uint8x16_t low = vreinterpretq_u8_s8(sixteens(codes16(x, inv)));
                    int8x16_t high = sixteens(codes16(x + 64, inv));
                    r[i] = vorrq_s8(vreinterpretq_s8_u8(vshrq_n_u8(low, 4)), high);
                }
                transpose4(r, out + 16 * col + 4 * row);
            }
}

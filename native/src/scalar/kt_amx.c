/* One tile of the AMX B-operand layout: 16 rows x 64 bytes, seen as 16 x 16 words of 32 bits and transposed. */
#include <string.h>

#include "../table.h"
#include "absmax.h"

/* The transposition is its own inverse but for the strides. */
enum { ROWS = 16, WORDS = 16, WORD_BYTES = 4, HALF = 64 };

void ktq_scalar_kt_amx_tile_i8(const int8_t *codes, size_t stride, int8_t *tile) {
    for (int row = 0; row < ROWS; row++)
        for (int word = 0; word < WORDS; word++)
            memcpy(tile + (word * ROWS + row) * WORD_BYTES, codes + (size_t)row * stride + word * WORD_BYTES,
                   WORD_BYTES);
}

/* Byte j of a row holds column j in its low nibble and column 64 + j in its high nibble. */
void ktq_scalar_kt_amx_tile_i4(const int8_t *codes, size_t stride, int8_t *tile) {
    int8_t bytes[ROWS * HALF];
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < HALF; j++) {
            const int8_t *c = codes + (size_t)row * stride + j;
            bytes[row * HALF + j] = (int8_t)((c[0] & 0x0F) | ((c[HALF] & 0x0F) << 4));
        }
    ktq_scalar_kt_amx_tile_i8(bytes, HALF, tile);
}

void ktq_scalar_kt_amx_untile_i8(const int8_t *tile, size_t stride, int8_t *codes) {
    for (int row = 0; row < ROWS; row++)
        for (int word = 0; word < WORDS; word++)
            memcpy(codes + (size_t)row * stride + word * WORD_BYTES, tile + (word * ROWS + row) * WORD_BYTES,
                   WORD_BYTES);
}

static int8_t code_of_nibble(unsigned nibble) { return (int8_t)((int)(nibble ^ 8u) - 8); }

void ktq_scalar_kt_amx_untile_i4(const int8_t *tile, size_t stride, int8_t *codes) {
    int8_t bytes[ROWS * HALF];
    ktq_scalar_kt_amx_untile_i8(tile, HALF, bytes);
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < HALF; j++) {
            unsigned byte = (uint8_t)bytes[row * HALF + j];
            int8_t *c = codes + (size_t)row * stride + j;
            c[0] = code_of_nibble(byte & 15u);
            c[HALF] = code_of_nibble(byte >> 4);
        }
}

static void panel(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out, int bits) {
    const size_t cols = bits == 8 ? HALF : 2 * HALF;
    int8_t codes[ROWS * 2 * HALF];
    for (size_t col = 0; col < k; col += cols, out += 2 * ROWS * HALF) {
        for (size_t row = 0; row < ROWS; row++)
            for (size_t j = 0; j < cols; j++) {
                float x = ktq_f32_of_bf16(w[row * stride + col + j]);
                codes[row * cols + j] = (int8_t)(bits == 8 ? ktq_code_i8 : ktq_code_i4)(x, inverse[row]);
            }
        (bits == 8 ? ktq_scalar_kt_amx_tile_i8 : ktq_scalar_kt_amx_tile_i4)(codes, cols, out);
    }
}

void ktq_scalar_kt_amx_panel_i8(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    panel(w, stride, k, inverse, out, 8);
}

void ktq_scalar_kt_amx_panel_i4(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    panel(w, stride, k, inverse, out, 4);
}

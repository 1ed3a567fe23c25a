/* One tile of the AMX B-operand layout: 16 rows x 64 bytes, seen as 16 x 16 words of 32 bits and transposed. */
#include <string.h>

#include "../table.h"

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

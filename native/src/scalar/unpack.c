/* Codes of 4 bits to bf16: a table says what each of the 16 stands for. */
#include "../table.h"

enum { RUN = 64 };

void ktq_scalar_nibble_row(const uint8_t *x, size_t count, const float *values, float scale, uint16_t *out) {
    float run[RUN];
    for (size_t start = 0; start < count; start += RUN) {
        size_t n = count - start < RUN ? count - start : RUN;
        for (size_t i = 0; i < n; i++) {
            size_t at = start + i;
            run[i] = values[x[at / 2] >> (at % 2 * 4) & 0x0F] * scale;
        }
        ktq_scalar_f32_row(run, n, out + start);
    }
}

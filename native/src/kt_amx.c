/* Quantises and packs 16 rows at a time: a panel of 16 rows is read from memory once, to find each row's largest
 * weight, and lies in L2 (7,168 columns of bf16 are 229 kB) when it is read again to be quantised and packed. */
#include "kt_amx.h"

#include "scalar/to_bf16.h"

enum { ROWS = 16, STEP_ROWS = 32, BLOCK_COLS = 3584, TILE_BYTES = 1024 };

/* Columns of fp8 that become bf16 at a time, on the stack: one step of columns of 4-bit tiles. */
enum { CHUNK = 128 };

static size_t step_cols(int bits) { return bits == 8 ? 64 : 128; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

int ktq_kt_amx_fits(size_t n, size_t k, int bits) {
    return (bits == 8 || bits == 4) && n % STEP_ROWS == 0 && k % step_cols(bits) == 0;
}

/* Blocks of rows, then blocks of columns, then steps of 32 rows, then steps of columns, then two tiles of 16 rows:
 * where that puts the first tile of a panel within the block of columns that begins at col0. Its next tiles follow at
 * every second place. What the order amounts to is stated once, here, for every instruction set. */
static size_t place(size_t row, size_t col0, size_t n, size_t k, int bits) {
    const size_t block_rows = bits == 8 ? 64 : 128;
    const size_t row0 = row / block_rows * block_rows;
    const size_t codes_before = row0 * k                                      /* blocks of rows */
                                + least(block_rows, n - row0) * col0          /* blocks of columns */
                                + (row - row0) / STEP_ROWS * STEP_ROWS * least(BLOCK_COLS, k - col0);
    return codes_before * (size_t)bits / 8 + row % STEP_ROWS / ROWS * TILE_BYTES;
}

void ktq_kt_amx_pack_with(const ktq_table *isa, const int8_t *codes, size_t n, size_t k, int bits, int8_t *out) {
    void (*tile)(const int8_t *, size_t, int8_t *) = bits == 8 ? isa->kt_amx_tile_i8 : isa->kt_amx_tile_i4;
    for (size_t row = 0; row < n; row += ROWS)
        for (size_t col0 = 0; col0 < k; col0 += BLOCK_COLS) {
            int8_t *to = out + place(row, col0, n, k, bits);
            for (size_t col = col0; col < least(k, col0 + BLOCK_COLS); col += step_cols(bits), to += 2 * TILE_BYTES)
                tile(codes + row * k + col, k, to);
        }
}

void ktq_kt_amx_unpack_with(const ktq_table *isa, const int8_t *packed, size_t n, size_t k, int bits, int8_t *codes) {
    void (*untile)(const int8_t *, size_t, int8_t *) = bits == 8 ? isa->kt_amx_untile_i8 : isa->kt_amx_untile_i4;
    for (size_t row = 0; row < n; row += ROWS)
        for (size_t col0 = 0; col0 < k; col0 += BLOCK_COLS) {
            const int8_t *from = packed + place(row, col0, n, k, bits);
            for (size_t col = col0; col < least(k, col0 + BLOCK_COLS); col += step_cols(bits), from += 2 * TILE_BYTES)
                untile(from, k, codes + row * k + col);
        }
}

/* Quantises one panel. An infinite inverse, of rows below 2^-121, needs clamps that only the scalar code has. */
static void panel(const ktq_table *isa, const uint16_t *w, size_t stride, size_t k, const float *inverse, int bits,
                  int8_t *out) {
    for (int i = 0; i < ROWS; i++)
        if (!isfinite(inverse[i])) isa = &ktq_scalar_table;
    (bits == 8 ? isa->kt_amx_panel_i8 : isa->kt_amx_panel_i4)(w, stride, k, inverse, out);
}

int ktq_kt_amx_bf16_with(const ktq_table *isa, const uint16_t *w, size_t n, size_t k, size_t stride, int bits,
                         int8_t *out, float *scales, struct ktq_where *where) {
    for (size_t row = 0; row < n; row += ROWS) {
        float inverse[ROWS];
        for (size_t i = row; i < row + ROWS; i++) {
            const uint16_t amax = isa->bf16_amax(w + i * stride, k);
            if (amax >= KTQ_BF16_INF) return ktq_not_finite(w + i * stride, k, i, where);
            scales[i] = ktq_row_scale(amax, bits);
            inverse[i - row] = ktq_inverse(scales[i]);
        }
        for (size_t col = 0; col < k; col += BLOCK_COLS)
            panel(isa, w + row * stride + col, stride, least(BLOCK_COLS, k - col), inverse, bits,
                  out + place(row, col, n, k, bits));
    }
    return KTQ_OK;
}

void ktq_fp8_rectangle(const ktq_table *isa, const uint8_t *w, size_t stride, size_t row0, size_t n, size_t col0,
                       size_t k, const struct ktq_blocks *blocks, uint16_t *out, size_t out_stride) {
    for (size_t row = 0, rows; row < n; row += rows) {
        const size_t grid_row = blocks->row0 + row0 + row;
        const float *scales = blocks->scale + grid_row / blocks->rows * blocks->stride;
        rows = least(blocks->rows - grid_row % blocks->rows, n - row);
        for (size_t col = 0, cols; col < k; col += cols) {
            const size_t grid_col = blocks->col0 + col0 + col;
            cols = least(blocks->cols - grid_col % blocks->cols, k - col);
            isa->fp8_block(w + (row0 + row) * stride + col0 + col, stride, rows, cols, scales[grid_col / blocks->cols],
                           out + row * out_stride + col, out_stride);
        }
    }
}

/* The largest magnitude of a row as bf16. Scaling and rounding keep the order of magnitudes, so only the largest byte
 * of each block is converted, and only the largest of these is rounded. A NaN stays once it is there. */
static uint16_t fp8_amax(const ktq_table *isa, const uint8_t *x, size_t row, size_t k, const struct ktq_blocks *blocks) {
    const float *scale = blocks->scale + (blocks->row0 + row) / blocks->rows * blocks->stride
                         + blocks->col0 / blocks->cols;
    float top = 0.0f;
    for (size_t col = 0, next = blocks->cols - blocks->col0 % blocks->cols; col < k; col = next, next += blocks->cols) {
        float value = ktq_f32_of_fp8(isa->fp8_amax(x + col, least(next, k) - col)) * fabsf(*scale++);
        if (value > top || isnan(value)) top = value;
    }
    return ktq_bf16_of_f32(top);
}

/* One weight as bf16, for what has to be asked of rows that are not finite. */
static uint16_t fp8_one(const uint8_t *w, size_t stride, size_t row, size_t col, const struct ktq_blocks *blocks) {
    uint16_t value;
    ktq_fp8_rectangle(&ktq_scalar_table, w, stride, row, 1, col, 1, blocks, &value, 0);
    return value;
}

int ktq_kt_amx_fp8_with(const ktq_table *isa, const uint8_t *w, size_t n, size_t k, size_t stride,
                        const struct ktq_blocks *blocks, int bits, int8_t *out, float *scales,
                        struct ktq_where *where) {
    for (size_t row0 = 0; row0 < n; row0 += ROWS) {
        float inverse[ROWS];
        for (size_t row = row0; row < row0 + ROWS; row++) {
            const uint16_t amax = fp8_amax(isa, w + row * stride, row, k, blocks);
            if (amax >= KTQ_BF16_INF) {
                size_t col = 0;
                while (col + 1 < k && (fp8_one(w, stride, row, col, blocks) & 0x7FFFu) < KTQ_BF16_INF) col++;
                *where = (struct ktq_where){row, col};
                return KTQ_NOT_FINITE;
            }
            scales[row] = ktq_row_scale(amax, bits);
            inverse[row - row0] = ktq_inverse(scales[row]);
        }
        for (size_t col0 = 0; col0 < k; col0 += BLOCK_COLS) {
            int8_t *to = out + place(row0, col0, n, k, bits);
            const size_t end = least(k, col0 + BLOCK_COLS);
            for (size_t col = col0; col < end; col += CHUNK, to += 2 * TILE_BYTES * CHUNK / step_cols(bits)) {
                uint16_t chunk[ROWS * CHUNK];
                const size_t cols = least(CHUNK, end - col);
                ktq_fp8_rectangle(isa, w, stride, row0, ROWS, col, cols, blocks, chunk, CHUNK);
                panel(isa, chunk, CHUNK, cols, inverse, bits, to);
            }
        }
    }
    return KTQ_OK;
}

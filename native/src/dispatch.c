/* Chooses the instruction set and carries each call of the public interface to its table. */
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"
#include "table.h"

enum { TILE_ROWS = 16, STEP_ROWS = 32, TILE_BYTES = 1024, STEP_COLS_I8 = 64, STEP_COLS_I4 = 128, BLOCK_COLS = 3584 };

static int always(void) { return 1; }

/* Worst first: the last one that this CPU supports is the default. */
static const struct {
    const ktq_table *table;
    int (*supported)(void);
} isas[] = {
    {&ktq_scalar_table, always},
#if defined(__x86_64__)
    {&ktq_avx2_table, ktq_cpu_has_avx2},
#endif
};

static const int isa_count = (int)(sizeof isas / sizeof isas[0]);

/* Null until the first call. Two threads that race here store the same pointer. */
static _Atomic(const ktq_table *) chosen;

static const ktq_table *table(void) {
    const ktq_table *now = atomic_load_explicit(&chosen, memory_order_acquire);
    if (now) return now;
    for (int i = 0; i < isa_count; i++)
        if (isas[i].supported()) now = isas[i].table;
    atomic_store_explicit(&chosen, now, memory_order_release);
    return now;
}

int ktq_isa_count(void) { return isa_count; }

const char *ktq_isa_name(int index) { return index >= 0 && index < isa_count ? isas[index].table->name : ""; }

int ktq_isa_supported(int index) { return index >= 0 && index < isa_count && isas[index].supported(); }

const char *ktq_isa_current(void) { return table()->name; }

int ktq_isa_use(const char *name) {
    for (int i = 0; i < isa_count; i++)
        if (strcmp(isas[i].table->name, name) == 0 && isas[i].supported()) {
            atomic_store_explicit(&chosen, isas[i].table, memory_order_release);
            return KTQ_OK;
        }
    return KTQ_NO_ISA;
}

int ktq_absmax(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *codes, float *scales,
               struct ktq_where *where) {
    if (stride < k) return KTQ_BAD_SHAPE;
    if (bits == 8) return table()->absmax_i8(w, n, k, stride, codes, scales, where);
    if (bits == 4) return table()->absmax_i4(w, n, k, stride, codes, scales, where);
    return KTQ_BAD_SHAPE;
}

/* Blocks of rows, then blocks of columns, then steps of 32 rows, then steps of columns, then two tiles of 16 rows:
 * what the order amounts to is stated once, here, for every instruction set. */
int ktq_kt_amx_pack(const int8_t *codes, size_t n, size_t k, int bits, int8_t *out) {
    if (bits != 8 && bits != 4) return KTQ_BAD_SHAPE;
    const size_t block_rows = bits == 8 ? 64 : 128;
    const size_t step_cols = bits == 8 ? STEP_COLS_I8 : STEP_COLS_I4;
    if (n % STEP_ROWS != 0 || k % step_cols != 0) return KTQ_BAD_SHAPE;
    void (*tile)(const int8_t *, size_t, int8_t *) = bits == 8 ? table()->kt_amx_tile_i8 : table()->kt_amx_tile_i4;
    for (size_t row0 = 0; row0 < n; row0 += block_rows)
        for (size_t col0 = 0; col0 < k; col0 += BLOCK_COLS)
            for (size_t row = row0; row < n && row < row0 + block_rows; row += STEP_ROWS)
                for (size_t col = col0; col < k && col < col0 + BLOCK_COLS; col += step_cols)
                    for (size_t half = 0; half < STEP_ROWS; half += TILE_ROWS) {
                        tile(codes + (row + half) * k + col, k, out);
                        out += TILE_BYTES;
                    }
    return KTQ_OK;
}

int ktq_fp8_to_bf16(const uint8_t *w, size_t n, size_t k, const float *scale, size_t scale_stride, size_t block_rows,
                    size_t block_cols, uint16_t *out) {
    if (block_rows == 0 || block_cols == 0) return KTQ_BAD_SHAPE;
    for (size_t row = 0; row < n; row++) {
        const float *scales = scale + row / block_rows * scale_stride;
        for (size_t col = 0; col < k; col += block_cols) {
            size_t count = k - col < block_cols ? k - col : block_cols;
            table()->fp8_row(w + row * k + col, count, scales[col / block_cols], out + row * k + col);
        }
    }
    return KTQ_OK;
}

int ktq_f16_to_bf16(const uint16_t *x, size_t count, uint16_t *out) {
    table()->f16_row(x, count, out);
    return KTQ_OK;
}

int ktq_f32_to_bf16(const float *x, size_t count, uint16_t *out) {
    table()->f32_row(x, count, out);
    return KTQ_OK;
}

int ktq_nibbles_to_bf16(const uint8_t *w, size_t n, size_t k, const float *values, const float *scale,
                        size_t scale_stride, size_t block_cols, uint16_t *out) {
    if (block_cols == 0 || block_cols % 2 != 0 || k % 2 != 0) return KTQ_BAD_SHAPE;
    for (size_t row = 0; row < n; row++)
        for (size_t col = 0; col < k; col += block_cols) {
            size_t count = k - col < block_cols ? k - col : block_cols;
            table()->nibble_row(w + (row * k + col) / 2, count, values, scale[row * scale_stride + col / block_cols],
                                out + row * k + col);
        }
    return KTQ_OK;
}

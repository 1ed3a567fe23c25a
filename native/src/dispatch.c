/* Chooses the instruction set and carries each call of the public interface to its table. */
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"
#include "scalar/absmax.h"
#include "table.h"

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    STEP_ROWS = 32,
    STEP_COLS_I8 = 64,
    STEP_COLS_I4 = 128,
    BLOCK_ROWS_I8 = 64,
    BLOCK_ROWS_I4 = 128,
    BLOCK_COLS = 3584
};

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

struct shape {
    size_t n, k;
    int bits;
};

struct tile {
    size_t index, row, col;
};

static size_t step_cols(const struct shape *s) { return s->bits == 8 ? STEP_COLS_I8 : STEP_COLS_I4; }

static int fits(const struct shape *s) {
    return (s->bits == 8 || s->bits == 4) && s->n % STEP_ROWS == 0 && s->k % step_cols(s) == 0;
}

static size_t tiles(const struct shape *s) { return s->n / TILE_ROWS * (s->k / step_cols(s)); }

/* Blocks of rows, then blocks of columns, then steps of 32 rows, then steps of columns, then two tiles of 16 rows:
 * what the order amounts to is stated once, here, for packing and unpacking and every instruction set. */
static void next_tile(const struct shape *s, struct tile *at) {
    const size_t block_rows = s->bits == 8 ? BLOCK_ROWS_I8 : BLOCK_ROWS_I4;
    const size_t row0 = at->row / block_rows * block_rows, col0 = at->col / BLOCK_COLS * BLOCK_COLS;
    const size_t row1 = s->n - row0 < block_rows ? s->n : row0 + block_rows;
    const size_t col1 = s->k - col0 < BLOCK_COLS ? s->k : col0 + BLOCK_COLS;
    at->index++;
    at->row += TILE_ROWS; /* the second half of the step */
    if (at->row % STEP_ROWS != 0) return;
    at->row -= STEP_ROWS;
    at->col += step_cols(s);
    if (at->col < col1) return;
    at->col = col0;
    at->row += STEP_ROWS;
    if (at->row < row1) return;
    at->row = row0;
    at->col = col1;
    if (at->col < s->k) return;
    at->col = 0;
    at->row = row1;
}

int ktq_kt_amx_pack(const int8_t *codes, size_t n, size_t k, int bits, int8_t *out) {
    const struct shape shape = {n, k, bits};
    if (!fits(&shape)) return KTQ_BAD_SHAPE;
    void (*tile)(const int8_t *, size_t, int8_t *) = bits == 8 ? table()->kt_amx_tile_i8 : table()->kt_amx_tile_i4;
    for (struct tile at = {0}; at.index < tiles(&shape); next_tile(&shape, &at))
        tile(codes + at.row * k + at.col, k, out + at.index * TILE_BYTES);
    return KTQ_OK;
}

int ktq_kt_amx_unpack(const int8_t *packed, size_t n, size_t k, int bits, int8_t *codes) {
    const struct shape shape = {n, k, bits};
    if (!fits(&shape)) return KTQ_BAD_SHAPE;
    void (*untile)(const int8_t *, size_t, int8_t *) = bits == 8 ? table()->kt_amx_untile_i8 : table()->kt_amx_untile_i4;
    for (struct tile at = {0}; at.index < tiles(&shape); next_tile(&shape, &at))
        untile(packed + at.index * TILE_BYTES, k, codes + at.row * k + at.col);
    return KTQ_OK;
}

int ktq_group(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, int bf16_scales,
              int8_t *codes, float *scales, int8_t *zeros, struct ktq_where *where) {
    if (stride < k || group == 0 || (bits != 4 && bits != 8)) return KTQ_BAD_SHAPE;
    const ktq_grid grid = {bits, zeros == NULL, bf16_scales};
    for (size_t row = 0; row < n; row++, w += stride, codes += k)
        for (size_t col = 0; col < k; col += group) {
            size_t count = k - col < group ? k - col : group;
            if (table()->group(w + col, count, &grid, codes + col, scales++, zeros ? zeros++ : NULL) != KTQ_OK)
                return ktq_not_finite(w, k, row, where);
        }
    return KTQ_OK;
}

int ktq_nibbles_pack(const int8_t *codes, size_t count, uint8_t *out) {
    if (count % 2 != 0) return KTQ_BAD_SHAPE;
    table()->nibbles_pack(codes, count, out);
    return KTQ_OK;
}

int ktq_nibbles_unpack(const uint8_t *packed, size_t count, int8_t *codes) {
    if (count % 2 != 0) return KTQ_BAD_SHAPE;
    table()->nibbles_unpack(packed, count, codes);
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

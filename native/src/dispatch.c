/* Chooses the instruction set and carries each call of the public interface to its table. */
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"
#include "feedback.h"
#include "floats.h"
#include "kt_amx.h"
#include "scalar/absmax.h"
#include "search.h"
#include "table.h"

static int always(void) { return 1; }

/* Worst first: the last one that this CPU supports is the default. */
static const struct {
    const ktq_table *table;
    int (*supported)(void);
} isas[] = {
    {&ktq_scalar_table, always},
#if defined(KTQ_X86_64)
    {&ktq_avx2_table, ktq_cpu_has_avx2},
    {&ktq_avx512_table, ktq_cpu_has_avx512},
#elif defined(KTQ_AARCH64)
    {&ktq_neon_table, always}, /* part of every aarch64 */
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

const char *ktq_isa_name(int index) { return index >= 0 && index < isa_count ? isas[index].table->isa : ""; }

int ktq_isa_supported(int index) { return index >= 0 && index < isa_count && isas[index].supported(); }

const char *ktq_isa_current(void) { return table()->isa; }

int ktq_isa_use(const char *name) {
    for (int i = 0; i < isa_count; i++)
        if (strcmp(isas[i].table->isa, name) == 0 && isas[i].supported()) {
            atomic_store_explicit(&chosen, isas[i].table, memory_order_release);
            return KTQ_OK;
        }
    return KTQ_NO_ISA;
}

int ktq_absmax(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *codes, float *scales,
               struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (stride < k || (bits != 8 && bits != 4)) return KTQ_BAD_SHAPE;
    for (size_t row = 0; row < n; row++, w += stride, codes += k) {
        const uint16_t amax = table()->bf16_amax(w, k);
        if (amax >= KTQ_BF16_INF) return ktq_not_finite(w, k, row, where);
        scales[row] = ktq_row_scale(amax, bits);
        const float inverse = ktq_inverse(scales[row]);
        const ktq_table *isa = isfinite(inverse) ? table() : &ktq_scalar_table;
        (bits == 8 ? isa->codes_i8 : isa->codes_i4)(w, k, inverse, codes);
    }
    return KTQ_OK;
}

int ktq_kt_amx_pack(const int8_t *codes, size_t n, size_t k, int bits, int8_t *out) {
    KTQ_DEFAULT_FLOATS;
    if (!ktq_kt_amx_fits(n, k, bits)) return KTQ_BAD_SHAPE;
    ktq_kt_amx_pack_with(table(), codes, n, k, bits, out);
    return KTQ_OK;
}

int ktq_kt_amx_unpack(const int8_t *packed, size_t n, size_t k, int bits, int8_t *codes) {
    KTQ_DEFAULT_FLOATS;
    if (!ktq_kt_amx_fits(n, k, bits)) return KTQ_BAD_SHAPE;
    ktq_kt_amx_unpack_with(table(), packed, n, k, bits, codes);
    return KTQ_OK;
}

int ktq_group(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, int narrow,
              int bf16_scales, int8_t *codes, float *scales, int8_t *zeros, struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (stride < k || group == 0 || (bits != 4 && bits != 8) || (narrow && zeros)) return KTQ_BAD_SHAPE;
    const ktq_grid grid = {bits, zeros == NULL, narrow, bf16_scales};
    for (size_t row = 0; row < n; row++, w += stride, codes += k)
        for (size_t col = 0; col < k; col += group) {
            size_t count = k - col < group ? k - col : group;
            if (table()->group(w + col, count, &grid, codes + col, scales++, zeros ? zeros++ : NULL) != KTQ_OK)
                return ktq_not_finite(w, k, row, where);
        }
    return KTQ_OK;
}

int ktq_search(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, const float *weights,
               const float *factors, size_t candidates, float step, int bf16_scales, float *room, int8_t *codes,
               float *scales, struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (stride < k || group == 0 || (bits != 4 && bits != 8) || candidates == 0) return KTQ_BAD_SHAPE;
    const ktq_search_how how = {factors, candidates, (float)((1 << (bits - 1)) - 1), step, bf16_scales};
    for (size_t row = 0; row < n; row++, w += stride, codes += k)
        for (size_t col = 0; col < k; col += group) {
            size_t count = k - col < group ? k - col : group;
            if (ktq_search_run(table(), w + col, count, weights ? weights + col : NULL, &how, room, codes + col, scales++)
                != KTQ_OK)
                return ktq_not_finite(w, k, row, where);
        }
    return KTQ_OK;
}

int ktq_product(const float *a, size_t a_row, size_t a_col, const float *b, size_t b_row, float *c, size_t c_row,
                size_t m, size_t k, size_t n) {
    KTQ_DEFAULT_FLOATS;
    if (b_row < n || c_row < n) return KTQ_BAD_SHAPE;
    table()->product(a, a_row, a_col, b, b_row, c, c_row, m, k, n);
    return KTQ_OK;
}

int ktq_silu(const float *gate, const float *up, size_t count, float *out) {
    KTQ_DEFAULT_FLOATS;
    for (size_t i = 0; i < count; i++) out[i] = (float)(gate[i] / (1 + ktq_exp(-(double)gate[i]))) * up[i];
    return KTQ_OK;
}

int ktq_factor(float *h, size_t k, double damping, double *room) {
    KTQ_DEFAULT_FLOATS;
    if (k == 0) return KTQ_BAD_SHAPE;
    return ktq_factor_with(table(), h, k, damping, room);
}

int ktq_feedback(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, const uint32_t *order,
                 const float *factor, const float *scales, float step, float *room, int8_t *codes,
                 struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (stride < k || group == 0 || (bits != 4 && bits != 8)) return KTQ_BAD_SHAPE;
    const size_t groups = (k + group - 1) / group;
    const ktq_feedback_how how = {order, factor, k, group, groups, (float)((1 << (bits - 1)) - 1), step};
    for (size_t row = 0; row < n; row++)
        if (table()->bf16_amax(w + row * stride, k) >= KTQ_BF16_INF)
            return ktq_not_finite(w + row * stride, k, row, where);
    for (size_t row = 0; row < n; row += KTQ_ROWS) {
        const size_t rows = n - row < KTQ_ROWS ? n - row : KTQ_ROWS;
        ktq_feedback_rows(table(), w + row * stride, rows, stride, &how, scales + row * groups, room, codes + row * k);
    }
    return KTQ_OK;
}

int ktq_nibbles_pack(const int8_t *codes, size_t count, uint8_t *out) {
    KTQ_DEFAULT_FLOATS;
    if (count % 2 != 0) return KTQ_BAD_SHAPE;
    table()->nibbles_pack(codes, count, out);
    return KTQ_OK;
}

int ktq_nibbles_unpack(const uint8_t *packed, size_t count, int8_t *codes) {
    KTQ_DEFAULT_FLOATS;
    if (count % 2 != 0) return KTQ_BAD_SHAPE;
    table()->nibbles_unpack(packed, count, codes);
    return KTQ_OK;
}

int ktq_fp8_to_bf16(const uint8_t *w, size_t n, size_t k, const float *scale, size_t scale_stride, size_t block_rows,
                    size_t block_cols, uint16_t *out) {
    KTQ_DEFAULT_FLOATS;
    if (block_rows == 0 || block_cols == 0) return KTQ_BAD_SHAPE;
    const struct ktq_blocks blocks = {scale, scale_stride, block_rows, block_cols, 0, 0};
    ktq_fp8_rectangle(table(), w, k, 0, n, 0, k, &blocks, out, k);
    return KTQ_OK;
}

int ktq_f16_to_bf16(const uint16_t *x, size_t count, uint16_t *out) {
    KTQ_DEFAULT_FLOATS;
    table()->f16_row(x, count, out);
    return KTQ_OK;
}

int ktq_f32_to_bf16(const float *x, size_t count, uint16_t *out) {
    KTQ_DEFAULT_FLOATS;
    table()->f32_row(x, count, out);
    return KTQ_OK;
}

int ktq_kt_amx_from_bf16(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *out, float *scales,
                         struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (!ktq_kt_amx_fits(n, k, bits) || stride < k) return KTQ_BAD_SHAPE;
    return ktq_kt_amx_bf16_with(table(), w, n, k, stride, bits, out, scales, where);
}

int ktq_kt_amx_from_fp8(const uint8_t *w, size_t n, size_t k, size_t stride, const struct ktq_blocks *blocks, int bits,
                        int8_t *out, float *scales, struct ktq_where *where) {
    KTQ_DEFAULT_FLOATS;
    if (!ktq_kt_amx_fits(n, k, bits) || stride < k || blocks->rows == 0 || blocks->cols == 0) return KTQ_BAD_SHAPE;
    return ktq_kt_amx_fp8_with(table(), w, n, k, stride, blocks, bits, out, scales, where);
}

int ktq_nibbles_to_bf16(const uint8_t *w, size_t n, size_t k, const float *values, const float *scale,
                        size_t scale_stride, size_t block_cols, uint16_t *out) {
    KTQ_DEFAULT_FLOATS;
    if (block_cols == 0 || block_cols % 2 != 0 || k % 2 != 0) return KTQ_BAD_SHAPE;
    for (size_t row = 0; row < n; row++)
        for (size_t col = 0; col < k; col += block_cols) {
            size_t count = k - col < block_cols ? k - col : block_cols;
            table()->nibble_row(w + (row * k + col) / 2, count, values, scale[row * scale_stride + col / block_cols],
                                out + row * k + col);
        }
    return KTQ_OK;
}

int ktq_difference(const uint16_t *a, const uint16_t *b, size_t count, struct ktq_difference *total) {
    KTQ_DEFAULT_FLOATS;
    *total = (struct ktq_difference){0};
    table()->difference(a, b, count, total);
    /* Which of two NaNs comes out of a sum, and with what sign, no instruction set says. */
    double *sums[] = {&total->first, &total->second, &total->product, &total->square};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        if (isnan(*sums[i])) *sums[i] = NAN;
    return KTQ_OK;
}

/* One table of functions per instruction set. A folder under src/ is one instruction set: the same file names in
 * each, the same function names behind its prefix, and one table. */
#ifndef KTQ_TABLE_H
#define KTQ_TABLE_H

#include "api.h"

/* What the codes of a group may be. */
typedef struct ktq_grid {
    int bits;
    int symmetric;
    int narrow; /* without the lowest code */
    int bf16_scales;
} ktq_grid;

/* Every function of an instruction set, once: X(isa, result, name, parameters).
 *
 * The codes functions quantise one run of weights by an inverse scale, which only the scalar ones take infinite. Each
 * tile function turns 16 rows of codes, `stride` apart, into one 1024-byte tile, and each untile function a tile into
 * rows. group quantises one run; search_sums is described
 * in scalar/search.c; the products add a[m,k] times b[k,n] to c[m,n], whose every number is the sum over k in its order,
 * so that it does not matter how many are made at once; nibble_row converts one run of 4-bit codes; fp8_block converts n x k values that share
 * a scale, the row functions one run of values, and difference adds one run to a total. The amax functions give the largest magnitude of a run: its bits
 * without the sign, so a NaN is the largest. The panel functions quantise 16 rows of bf16, `stride` apart, by their 16
 * inverse scales (only the scalar ones take infinite ones) and leave tiles that begin 2048 bytes apart. */
#define KTQ_FUNCTIONS(X, isa)                                                                                         \
    X(isa, void, codes_i8, (const uint16_t *w, size_t k, float inverse, int8_t *codes))                               \
    X(isa, void, codes_i4, (const uint16_t *w, size_t k, float inverse, int8_t *codes))                               \
    X(isa, void, kt_amx_tile_i8, (const int8_t *codes, size_t stride, int8_t *tile))                                  \
    X(isa, void, kt_amx_tile_i4, (const int8_t *codes, size_t stride, int8_t *tile))                                  \
    X(isa, void, kt_amx_untile_i8, (const int8_t *tile, size_t stride, int8_t *codes))                                \
    X(isa, void, kt_amx_untile_i4, (const int8_t *tile, size_t stride, int8_t *codes))                                \
    X(isa, void, kt_amx_panel_i8, (const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out))    \
    X(isa, void, kt_amx_panel_i4, (const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out))    \
    X(isa, int, group,                                                                                                \
      (const uint16_t *w, size_t count, const ktq_grid *grid, int8_t *codes, float *scale, int8_t *zero))             \
    X(isa, void, search_sums,                                                                                         \
      (const float *m, const float *h, size_t count, const float *inverse, size_t candidates, float most, float *sums)) \
    X(isa, void, product,                                                                                             \
      (const float *a, size_t a_row, size_t a_col, const float *b, size_t b_row, float *c, size_t c_row, size_t m,    \
       size_t k, size_t n))                                                                                           \
    X(isa, void, product_double,                                                                                      \
      (const double *a, size_t a_row, size_t a_col, const double *b, size_t b_row, double *c, size_t c_row, size_t m, \
       size_t k, size_t n))                                                                                           \
    X(isa, void, nibbles_pack, (const int8_t *codes, size_t count, uint8_t *out))                                     \
    X(isa, void, nibbles_unpack, (const uint8_t *packed, size_t count, int8_t *codes))                                \
    X(isa, uint16_t, bf16_amax, (const uint16_t *w, size_t k))                                                        \
    X(isa, uint8_t, fp8_amax, (const uint8_t *x, size_t count))                                                       \
    X(isa, void, fp8_block,                                                                                           \
      (const uint8_t *x, size_t stride, size_t n, size_t k, float scale, uint16_t *out, size_t out_stride))           \
    X(isa, void, f16_row, (const uint16_t *x, size_t count, uint16_t *out))                                           \
    X(isa, void, f32_row, (const float *x, size_t count, uint16_t *out))                                              \
    X(isa, void, nibble_row, (const uint8_t *x, size_t count, const float *values, float scale, uint16_t *out))       \
    X(isa, void, difference, (const uint16_t *a, const uint16_t *b, size_t count, struct ktq_difference *total))

#define KTQ_MEMBER(isa, result, name, parameters) result(*name) parameters;
#define KTQ_PROTOTYPE(isa, result, name, parameters) result ktq_##isa##_##name parameters;
#define KTQ_ENTRY(isa, result, name, parameters) .name = ktq_##isa##_##name,

typedef struct ktq_table {
    const char *isa;
    KTQ_FUNCTIONS(KTQ_MEMBER, )
} ktq_table;

#define KTQ_DECLARE(isa)                                                                                              \
    KTQ_FUNCTIONS(KTQ_PROTOTYPE, isa)                                                                                 \
    extern const ktq_table ktq_##isa##_table

/* A folder without a function of its own for a name first defines that name as another folder's. */
#define KTQ_DEFINE_TABLE(isa_) const ktq_table ktq_##isa_##_table = {.isa = #isa_, KTQ_FUNCTIONS(KTQ_ENTRY, isa_)}

KTQ_DECLARE(scalar);
#if defined(KTQ_X86_64)
KTQ_DECLARE(avx2);
KTQ_DECLARE(avx512);
#elif defined(KTQ_AARCH64)
KTQ_DECLARE(neon);
#endif

#endif

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

typedef struct ktq_table {
    const char *name;
    void (*codes_i8)(const uint16_t *, size_t, float, int8_t *);
    void (*codes_i4)(const uint16_t *, size_t, float, int8_t *);
    void (*kt_amx_tile_i8)(const int8_t *, size_t, int8_t *);
    void (*kt_amx_tile_i4)(const int8_t *, size_t, int8_t *);
    void (*fp8_block)(const uint8_t *, size_t, size_t, size_t, float, uint16_t *, size_t);
    void (*f16_row)(const uint16_t *, size_t, uint16_t *);
    void (*f32_row)(const float *, size_t, uint16_t *);
    void (*kt_amx_untile_i8)(const int8_t *, size_t, int8_t *);
    void (*kt_amx_untile_i4)(const int8_t *, size_t, int8_t *);
    int (*group)(const uint16_t *, size_t, const ktq_grid *, int8_t *, float *, int8_t *);
    void (*nibbles_pack)(const int8_t *, size_t, uint8_t *);
    void (*nibbles_unpack)(const uint8_t *, size_t, int8_t *);
    uint16_t (*bf16_amax)(const uint16_t *, size_t);
    uint8_t (*fp8_amax)(const uint8_t *, size_t);
    void (*kt_amx_panel_i8)(const uint16_t *, size_t, size_t, const float *, int8_t *);
    void (*kt_amx_panel_i4)(const uint16_t *, size_t, size_t, const float *, int8_t *);
    void (*nibble_row)(const uint8_t *, size_t, const float *, float, uint16_t *);
} ktq_table;

/* Declares the functions of one instruction set. The codes functions quantise one run of weights by an inverse scale,
 * which only the scalar ones take infinite. Each tile function turns 16 rows of codes, `stride` apart, into
 * one 1024-byte tile, and each untile function a tile into rows; group quantises one run; nibble_row converts
 * one run of 4-bit codes; fp8_block converts n x k values that share a scale, the row functions one run of values. The amax
 * functions give the largest magnitude of a run: its bits without the sign, so a NaN is the largest. The panel functions
 * quantise 16 rows of bf16, `stride` apart, by their 16 inverse scales (only the scalar ones take infinite inverses)
 * and leave tiles that begin 2048 bytes apart. */
#define KTQ_DECLARE(isa)                                                                                              \
    void ktq_##isa##_codes_i8(const uint16_t *, size_t, float, int8_t *);                                             \
    void ktq_##isa##_codes_i4(const uint16_t *, size_t, float, int8_t *);                                             \
    void ktq_##isa##_kt_amx_tile_i8(const int8_t *, size_t, int8_t *);                                                \
    void ktq_##isa##_kt_amx_tile_i4(const int8_t *, size_t, int8_t *);                                                \
    void ktq_##isa##_fp8_block(const uint8_t *, size_t, size_t, size_t, float, uint16_t *, size_t);                   \
    void ktq_##isa##_f16_row(const uint16_t *, size_t, uint16_t *);                                                   \
    void ktq_##isa##_f32_row(const float *, size_t, uint16_t *);                                                      \
    void ktq_##isa##_kt_amx_untile_i8(const int8_t *, size_t, int8_t *);                                              \
    void ktq_##isa##_kt_amx_untile_i4(const int8_t *, size_t, int8_t *);                                              \
    int ktq_##isa##_group(const uint16_t *, size_t, const ktq_grid *, int8_t *, float *, int8_t *);                   \
    void ktq_##isa##_nibbles_pack(const int8_t *, size_t, uint8_t *);                                                 \
    void ktq_##isa##_nibbles_unpack(const uint8_t *, size_t, int8_t *);                                               \
    uint16_t ktq_##isa##_bf16_amax(const uint16_t *, size_t);                                                         \
    uint8_t ktq_##isa##_fp8_amax(const uint8_t *, size_t);                                                            \
    void ktq_##isa##_kt_amx_panel_i8(const uint16_t *, size_t, size_t, const float *, int8_t *);                      \
    void ktq_##isa##_kt_amx_panel_i4(const uint16_t *, size_t, size_t, const float *, int8_t *);                      \
    void ktq_##isa##_nibble_row(const uint8_t *, size_t, const float *, float, uint16_t *);                           \
    extern const ktq_table ktq_##isa##_table

#define KTQ_DEFINE_TABLE(isa)                                                                                         \
    const ktq_table ktq_##isa##_table = {#isa,                                                                        \
                                         ktq_##isa##_codes_i8,                                                        \
                                         ktq_##isa##_codes_i4,                                                        \
                                         ktq_##isa##_kt_amx_tile_i8,                                                  \
                                         ktq_##isa##_kt_amx_tile_i4,                                                  \
                                         ktq_##isa##_fp8_block,                                                       \
                                         ktq_##isa##_f16_row,                                                         \
                                         ktq_##isa##_f32_row,                                                         \
                                         ktq_##isa##_kt_amx_untile_i8,                                                \
                                         ktq_##isa##_kt_amx_untile_i4,                                                \
                                         ktq_##isa##_group,                                                           \
                                         ktq_##isa##_nibbles_pack,                                                    \
                                         ktq_##isa##_nibbles_unpack,                                                  \
                                         ktq_##isa##_bf16_amax,                                                       \
                                         ktq_##isa##_fp8_amax,                                                        \
                                         ktq_##isa##_kt_amx_panel_i8,                                                 \
                                         ktq_##isa##_kt_amx_panel_i4,                                                 \
                                         ktq_##isa##_nibble_row}

KTQ_DECLARE(scalar);
#if defined(__x86_64__)
KTQ_DECLARE(avx2);
KTQ_DECLARE(avx512);
#elif defined(__aarch64__)
KTQ_DECLARE(neon);
#endif

#endif

/* One table of functions per instruction set. A folder under src/ is one instruction set: the same file names in
 * each, the same function names behind its prefix, and one table. */
#ifndef KTQ_TABLE_H
#define KTQ_TABLE_H

#include "api.h"

typedef struct ktq_table {
    const char *name;
    int (*absmax_i8)(const uint16_t *, size_t, size_t, size_t, int8_t *, float *, struct ktq_where *);
    int (*absmax_i4)(const uint16_t *, size_t, size_t, size_t, int8_t *, float *, struct ktq_where *);
    void (*kt_amx_tile_i8)(const int8_t *, size_t, int8_t *);
    void (*kt_amx_tile_i4)(const int8_t *, size_t, int8_t *);
    void (*fp8_row)(const uint8_t *, size_t, float, uint16_t *);
    void (*f16_row)(const uint16_t *, size_t, uint16_t *);
    void (*f32_row)(const float *, size_t, uint16_t *);
    void (*nibble_row)(const uint8_t *, size_t, const float *, float, uint16_t *);
} ktq_table;

/* Declares the functions of one instruction set. Each tile function turns 16 rows of codes, `stride` apart, into
 * one 1024-byte tile; each row function converts one run of values. */
#define KTQ_DECLARE(isa)                                                                                              \
    int ktq_##isa##_absmax_i8(const uint16_t *, size_t, size_t, size_t, int8_t *, float *, struct ktq_where *);       \
    int ktq_##isa##_absmax_i4(const uint16_t *, size_t, size_t, size_t, int8_t *, float *, struct ktq_where *);       \
    void ktq_##isa##_kt_amx_tile_i8(const int8_t *, size_t, int8_t *);                                                \
    void ktq_##isa##_kt_amx_tile_i4(const int8_t *, size_t, int8_t *);                                                \
    void ktq_##isa##_fp8_row(const uint8_t *, size_t, float, uint16_t *);                                             \
    void ktq_##isa##_f16_row(const uint16_t *, size_t, uint16_t *);                                                   \
    void ktq_##isa##_f32_row(const float *, size_t, uint16_t *);                                                      \
    void ktq_##isa##_nibble_row(const uint8_t *, size_t, const float *, float, uint16_t *);                           \
    extern const ktq_table ktq_##isa##_table

#define KTQ_DEFINE_TABLE(isa)                                                                                         \
    const ktq_table ktq_##isa##_table = {#isa,                                                                        \
                                         ktq_##isa##_absmax_i8,                                                       \
                                         ktq_##isa##_absmax_i4,                                                       \
                                         ktq_##isa##_kt_amx_tile_i8,                                                  \
                                         ktq_##isa##_kt_amx_tile_i4,                                                  \
                                         ktq_##isa##_fp8_row,                                                         \
                                         ktq_##isa##_f16_row,                                                         \
                                         ktq_##isa##_f32_row,                                                         \
                                         ktq_##isa##_nibble_row}

KTQ_DECLARE(scalar);
#if defined(__x86_64__)
KTQ_DECLARE(avx2);
#endif

#endif

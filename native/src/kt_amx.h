/* The order of the AMX B-operand layout and the kernels that go straight to it, for any instruction set. */
#ifndef KTQ_KT_AMX_H
#define KTQ_KT_AMX_H

#include "table.h"

int ktq_kt_amx_fits(size_t n, size_t k, int bits);

void ktq_kt_amx_pack_with(const ktq_table *isa, const int8_t *codes, size_t n, size_t k, int bits, int8_t *out);

void ktq_kt_amx_unpack_with(const ktq_table *isa, const int8_t *packed, size_t n, size_t k, int bits, int8_t *codes);

int ktq_kt_amx_bf16_with(const ktq_table *isa, const uint16_t *w, size_t n, size_t k, size_t stride, int bits,
                         int8_t *out, float *scales, struct ktq_where *where);

int ktq_kt_amx_fp8_with(const ktq_table *isa, const uint8_t *w, size_t n, size_t k, size_t stride,
                        const struct ktq_blocks *blocks, int bits, int8_t *out, float *scales,
                        struct ktq_where *where);

/* n rows from row0 and k columns from col0 of fp8 w, whose rows are `stride` apart, as bf16. */
void ktq_fp8_rectangle(const ktq_table *isa, const uint8_t *w, size_t stride, size_t row0, size_t n, size_t col0,
                       size_t k, const struct ktq_blocks *blocks, uint16_t *out, size_t out_stride);

#endif

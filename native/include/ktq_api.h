/* ktq: the kernels of ktforge. Read by the C compiler and by cffi alike, so this file holds plain
 * declarations only: whoever includes it includes <stddef.h> and <stdint.h> first.
 *
 * Rules of every function here: it allocates nothing, keeps no pointer, prints nothing, and returns a status.
 * Matrices are row-major; `stride` is the distance between rows, in elements, so that a column range of a
 * larger matrix is read in place. bf16 values travel as their 16 bits. */

enum ktq_status {
    KTQ_OK = 0,
    KTQ_NOT_FINITE = 1, /* a weight is NaN or infinite; *where says which */
    KTQ_BAD_SHAPE = 2,  /* the sizes do not fit the format */
    KTQ_NO_ISA = 3      /* this build or this CPU does not have that instruction set */
};

struct ktq_where {
    size_t row;
    size_t col;
};

/* Instruction sets: chosen once at load from cpuid; ktq_isa_use() replaces the choice, for tests and KTFORGE_ISA. */
int ktq_isa_count(void);
const char *ktq_isa_name(int index);
int ktq_isa_supported(int index);
const char *ktq_isa_current(void);
int ktq_isa_use(const char *name);

/* Absmax quantisation of w[n,k], one scale a row, as KTransformers does it (docs/formats/kt-amx.md).
 * bits is 8 or 4; codes[n,k] gets values in -128..127 or -8..7, scales[n] the float32 scale of an 8-bit code:
 * value = code * scale for 8 bits, code * 16 * scale for 4. */
int ktq_absmax(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *codes, float *scales,
               struct ktq_where *where);

/* Packs codes[n,k] into the AMX B-operand layout: n*k bytes for 8 bits, n*k/2 for 4.
 * n must be a multiple of 32, k of 64 (8 bits) or 128 (4 bits). */
int ktq_kt_amx_pack(const int8_t *codes, size_t n, size_t k, int bits, int8_t *out);

/* float8_e4m3fn times one float32 scale per block of block_rows x block_cols, rounded to the nearest bf16.
 * scale is row-major with scale_stride elements a row; the last block of a row or column may be cut short. */
int ktq_fp8_to_bf16(const uint8_t *w, size_t n, size_t k, const float *scale, size_t scale_stride, size_t block_rows,
                    size_t block_cols, uint16_t *out);

/* count values, rounded to the nearest bf16, ties to even; a NaN stays a NaN. */
int ktq_f16_to_bf16(const uint16_t *x, size_t count, uint16_t *out);
int ktq_f32_to_bf16(const float *x, size_t count, uint16_t *out);

/* Codes of 4 bits, two a byte and the lower half first: w[n, k/2]. values[16] says what each code stands for, scale
 * (row-major, scale_stride elements a row) multiplies block_cols columns of a row; rounded to the nearest bf16.
 * k and block_cols are even; the last block of a row may be cut short. */
int ktq_nibbles_to_bf16(const uint8_t *w, size_t n, size_t k, const float *values, const float *scale,
                        size_t scale_stride, size_t block_cols, uint16_t *out);

/* ktq: the kernels of ktforge. Read by the C compiler and by cffi alike, so this file holds plain
 * declarations only: whoever includes it includes <stddef.h> and <stdint.h> first.
 *
 * Rules of every function here: it allocates nothing, keeps no pointer (but for ktq_lost_pages_watch), prints nothing,
 * and returns a status. What computes does so in the default floating-point environment, whatever the caller's is.
 * Matrices are row-major; `stride` is the distance between rows, in elements, so that a column range of a
 * larger matrix is read in place. bf16 values travel as their 16 bits. */

enum ktq_status {
    KTQ_OK = 0,
    KTQ_NOT_FINITE = 1, /* a weight is NaN or infinite; *where says which */
    KTQ_BAD_SHAPE = 2,  /* the sizes do not fit the format */
    KTQ_NO_ISA = 3,     /* this build or this CPU does not have that instruction set */
    KTQ_NO_HANDLER = 4, /* the system does not let SIGBUS be handled */
    KTQ_TOO_MANY = 5    /* no room for another range: 65,536 are watched */
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
 * bits is 8 or 4; codes[n,k] gets values in -127..127 or -7..7, scales[n] the float32 scale of an 8-bit code:
 * value = code * scale for 8 bits, code * 16 * scale for 4. */
int ktq_absmax(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *codes, float *scales,
               struct ktq_where *where);

/* Packs codes[n,k] into the AMX B-operand layout: n*k bytes for 8 bits, n*k/2 for 4.
 * n must be a multiple of 32, k of 64 (8 bits) or 128 (4 bits). */
int ktq_kt_amx_pack(const int8_t *codes, size_t n, size_t k, int bits, int8_t *out);

/* The inverse of ktq_kt_amx_pack: codes[n,k] from a packed weight. */
int ktq_kt_amx_unpack(const int8_t *packed, size_t n, size_t k, int bits, int8_t *codes);

/* Quantisation of w[n,k] in groups of `group` columns (the last of a row may be shorter), `groups` of them a row:
 * codes[n,k] of `bits` (4 or 8) bits, scales[n,groups], and zeros[n,groups], or NULL for symmetric codes.
 * value = (code - zero) * scale (docs/formats/compressed-tensors.md). narrow leaves out the lowest of symmetric codes,
 * -2^(bits-1); bf16_scales rounds scales to bf16 first. */
int ktq_group(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, int narrow,
              int bf16_scales, int8_t *codes, float *scales, int8_t *zeros, struct ktq_where *where);

/* The same for symmetric codes without the lowest, of scales that are searched: for each group the best of `candidates`
 * scales, factors[i] * largest / most, by the squared error of its weights, each weighted with weights[k] (not
 * negative, 1 at most) or, where that is NULL, with the magnitude of the weight itself. The best is fitted to its codes
 * by least squares, again and again as long as that helps (docs/quality.md has the measurements).
 * value = code * step * scale; step is a power of two. room is for 2 * group + 16 floats. */
int ktq_search(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, const float *weights,
               const float *factors, size_t candidates, float step, int bf16_scales, float *room, int8_t *codes,
               float *scales, struct ktq_where *where);

/* Adds a[m,k] times b[k,n] to c[m,n], each number as the sum over k in its order. The numbers of a are a_row and a_col
 * apart, so that it may be read as its transpose. */
int ktq_product(const float *a, size_t a_row, size_t a_col, const float *b, size_t b_row, float *c, size_t c_row,
                size_t m, size_t k, size_t n);

/* out[count] = silu(gate) * up; the exponential is a polynomial of this library's own. */
int ktq_silu(const float *gate, const float *up, size_t count, float *out);

/* Turns second moments h[k,k] (symmetric) into the upper Cholesky factor of their inverse, after damping times the mean
 * of the diagonal was added to it; what lies below the diagonal becomes 0. In float64, in room[k * k + 2 * 64 * k].
 * KTQ_NOT_FINITE if they are no second moments. */
int ktq_factor(float *h, size_t k, double damping, double *room);

/* Codes of w[n,k] with error feedback (GPTQ, arXiv 2210.17323): column by column in the order of order[k], each error
 * divided by the factor's diagonal and spread over the columns behind it. factor[k,k] is that of moments in this order;
 * scales[n, k / group] are given; code = clamp(rint(w / (scale * step))), most at the ends.
 * room is for 32 * (k + 64) floats. */
int ktq_feedback(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, size_t group, const uint32_t *order,
                 const float *factor, const float *scales, float step, float *room, int8_t *codes,
                 struct ktq_where *where);

/* Codes of 4 bits, two a byte, low nibble first, each stored as code + 8; count must be even. */
int ktq_nibbles_pack(const int8_t *codes, size_t count, uint8_t *out);
int ktq_nibbles_unpack(const uint8_t *packed, size_t count, int8_t *codes);

/* float8_e4m3fn times one float32 scale per block of block_rows x block_cols, rounded to the nearest bf16.
 * scale is row-major with scale_stride elements a row; the last block of a row or column may be cut short. */
int ktq_fp8_to_bf16(const uint8_t *w, size_t n, size_t k, const float *scale, size_t scale_stride, size_t block_rows,
                    size_t block_cols, uint16_t *out);

/* count values, rounded to the nearest bf16, ties to even; a NaN stays a NaN. */
int ktq_f16_to_bf16(const uint16_t *x, size_t count, uint16_t *out);
int ktq_f32_to_bf16(const float *x, size_t count, uint16_t *out);

/* Both steps in one, 16 rows at a time: bf16 w[n,k] to the bytes of ktq_kt_amx_pack(ktq_absmax(w)), without a copy of
 * the codes; out gets n*k*bits/8 bytes, scales[n] the scales. */
int ktq_kt_amx_from_bf16(const uint16_t *w, size_t n, size_t k, size_t stride, int bits, int8_t *out, float *scales,
                         struct ktq_where *where);

/* Block scales of an fp8 matrix, as in ktq_fp8_to_bf16. A part of a larger matrix begins at row0, col0 of the grid. */
struct ktq_blocks {
    const float *scale;
    size_t stride, rows, cols;
    size_t row0, col0;
};

/* The same for float8_e4m3fn: equal to ktq_fp8_to_bf16 before ktq_kt_amx_from_bf16, without a bf16 copy. */
int ktq_kt_amx_from_fp8(const uint8_t *w, size_t n, size_t k, size_t stride, const struct ktq_blocks *blocks, int bits,
                        int8_t *out, float *scales, struct ktq_where *where);

/* Between (1) and (0), reading a page of a watched range that is gone, since its file was cut short or its disk failed,
 * gives zeros instead of SIGBUS, in every thread; from there on the range is zeros to its end. Every other SIGBUS, and
 * one for a write, goes to the handler that was there before, as the system sent it. That one comes back with (0),
 * unless another was installed meanwhile. Calls do not nest, and no two threads may make them at once. */
int ktq_catch_lost_pages(int on);

/* A mapping is watched from watch to unwatch, which must come before it is unmapped. It has a place in a table of
 * fixed size; any thread may call these at any time. start is the address that watch was given. */
int ktq_lost_pages_watch(const void *start, size_t size);
void ktq_lost_pages_unwatch(const void *start);

/* How many pages became zeros: of a watched range, and of all since the process began. */
size_t ktq_lost_pages_of(const void *start);
size_t ktq_lost_pages(void);

/* Codes of 4 bits, two a byte and the lower half first: w[n, k/2]. values[16] says what each code stands for, scale
 * (row-major, scale_stride elements a row) multiplies block_cols columns of a row; rounded to the nearest bf16.
 * k and block_cols are even; the last block of a row may be cut short. */
int ktq_nibbles_to_bf16(const uint8_t *w, size_t n, size_t k, const float *values, const float *scale,
                        size_t scale_stride, size_t block_cols, uint16_t *out);

/* How far count weights are apart from others, in sums over all. A NaN or an infinity among them leaves no sum finite
 * that it is part of. */
struct ktq_difference {
    double first, second; /* squares of the one and of the other */
    double product;       /* one times the other */
    double square;        /* squares of the difference */
    double largest;       /* the largest magnitude of the difference */
};
int ktq_difference(const uint16_t *a, const uint16_t *b, size_t count, struct ktq_difference *total);

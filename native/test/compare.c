/* Every instruction set of a build against its scalar code, bit for bit, through the public interface. For those that
 * this CPU lacks: AVX-512 compiled against simde (tests/native/test_compare.py), NEON under qemu (make test-neon).
 *
 * Prints one line a set, or what differs; the exit status is 1 if anything does, or if a set was named that this build
 * does not have. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/api.h"

enum { MOST_ROWS = 160, MOST_COLS = 3584 + 3 * 128, MOST = MOST_ROWS * MOST_COLS };

/* One call: sizes, and where they matter the distance between rows and the rows and columns that share a scale. */
struct call {
    int bits, symmetric, narrow, bf16_scales;
    size_t n, k, stride, rows, cols;
};

static uint64_t state;

static uint64_t random64(void) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static size_t below(size_t n) { return (size_t)(random64() % n); }

static float power_of_two(int exponent) { /* and a little more, so that products are rounded */
    uint32_t bits = (uint32_t)(exponent + 127) << 23 | (uint32_t)(random64() & 0x7FFFFF);
    float value;
    memcpy(&value, &bits, sizeof value);
    return random64() & 1 ? value : -value;
}

static uint16_t w[MOST];
static uint8_t fp8[MOST];
static float f32[MOST / 8], scale[MOST_ROWS * MOST_COLS];

/* What one instruction set made, cleared before each call. */
static struct result {
    int status;
    struct ktq_where where;
    float scales[MOST];
    int8_t zeros[MOST];
    int8_t bytes[2 * MOST];
} want, got;

static uint16_t *bf16_of(struct result *r) { return (uint16_t *)(void *)r->bytes; }

static int run_absmax(const struct call *c, struct result *r) {
    return ktq_absmax(w, c->n, c->k, c->stride, c->bits, r->bytes, r->scales, &r->where);
}

static int run_from_bf16(const struct call *c, struct result *r) {
    return ktq_kt_amx_from_bf16(w, c->n, c->k, c->stride, c->bits, r->bytes, r->scales, &r->where);
}

static int run_from_fp8(const struct call *c, struct result *r) {
    struct ktq_blocks blocks = {scale, c->stride / c->cols + 1, c->rows, c->cols, c->rows / 2, c->cols / 3};
    return ktq_kt_amx_from_fp8(fp8, c->n, c->k, c->stride, &blocks, c->bits, r->bytes, r->scales, &r->where);
}

static int run_pack(const struct call *c, struct result *r) {
    return ktq_kt_amx_pack((const int8_t *)w, c->n, c->k, c->bits, r->bytes);
}

static int run_unpack(const struct call *c, struct result *r) {
    return ktq_kt_amx_unpack((const int8_t *)fp8, c->n, c->k, c->bits, r->bytes);
}

static int run_group(const struct call *c, struct result *r) {
    return ktq_group(w, c->n, c->k, c->stride, c->bits, c->cols, c->symmetric && c->narrow, c->bf16_scales, r->bytes,
                     r->scales, c->symmetric ? NULL : r->zeros, &r->where);
}

static int run_search(const struct call *c, struct result *r) {
    static float weights[MOST_COLS], factors[40], room[2 * MOST_COLS + 16];
    for (size_t j = 0; j < c->k; j++) weights[j] = (float)(fp8[j] & 0x3F) / 63.0f;
    for (size_t i = 0; i < 40; i++) factors[i] = 0.25f + 0.02f * (float)i;
    return ktq_search(w, c->n, c->k, c->stride, c->bits, c->rows == 128 ? c->k : c->cols,
                      c->symmetric ? weights : NULL, factors, 1 + c->cols % 40, c->narrow ? 16.0f : 1.0f,
                      c->bf16_scales, room, r->bytes, r->scales, &r->where);
}

static int run_product(const struct call *c, struct result *r) {
    const size_t m = 1 + c->rows % 40, k = 1 + c->k % 600, n = 1 + c->cols % 100;
    return ktq_product(scale, c->symmetric ? k : 1, c->symmetric ? 1 : m, scale + 1000, n, r->scales, n, m, k, n);
}

static int run_silu(const struct call *c, struct result *r) {
    return ktq_silu(scale, scale + 500, 1 + c->k, r->scales);
}

/* Moments of random inputs, whose sums go through the product of the instruction set. */
static int run_factor(const struct call *c, struct result *r) {
    static double room[200 * (200 + 128)];
    const size_t k = 1 + c->k % 200;
    float *x = (float *)(void *)r->bytes;
    for (size_t i = 0; i < 2 * k * k; i++) x[i] = (float)((int)fp8[i % MOST] - 128) / 64.0f;
    ktq_product(x, 1, k, x, k, r->scales, k, k, 2 * k, k);
    return ktq_factor(r->scales, k, 0.01, room);
}

static int run_feedback(const struct call *c, struct result *r) {
    static uint32_t order[200];
    static float factor[200 * 200], room[32 * (200 + 64)];
    const size_t n = 1 + c->n % 70, k = 1 + c->k % 200, group = 1 + c->cols % k;
    for (size_t j = 0; j < k; j++) order[j] = (uint32_t)(k - 1 - j);
    for (size_t i = 0; i < k * k; i++) factor[i] = i % (k + 1) ? (float)((int)fp8[i] - 128) / 4096.0f : 1.0f;
    return ktq_feedback(w, n, k, c->stride, c->bits, group, order, factor, scale, c->narrow ? 16.0f : 1.0f, room,
                        r->bytes, &r->where);
}

static int run_nibbles_pack(const struct call *c, struct result *r) {
    return ktq_nibbles_pack((const int8_t *)fp8, c->n * c->k / 2 * 2, (uint8_t *)r->bytes);
}

static int run_nibbles_unpack(const struct call *c, struct result *r) {
    return ktq_nibbles_unpack(fp8, c->n * c->k / 2 * 2, r->bytes);
}

static int run_nibbles_to_bf16(const struct call *c, struct result *r) {
    const size_t cols = (c->cols + 1) / 2 * 2, k = c->k / 2 * 2;
    return ktq_nibbles_to_bf16(fp8, c->n, k, f32, scale, k / cols + 1, cols, bf16_of(r));
}

static int run_fp8(const struct call *c, struct result *r) {
    return ktq_fp8_to_bf16(fp8, c->n, c->k, scale, c->k / c->cols + 1, c->rows, c->cols, bf16_of(r));
}

static int run_f16(const struct call *c, struct result *r) { return ktq_f16_to_bf16(w, c->n * c->k, bf16_of(r)); }

static int run_f32(const struct call *c, struct result *r) { return ktq_f32_to_bf16(f32, c->n * c->k / 8, bf16_of(r)); }

static int run_difference(const struct call *c, struct result *r) {
    return ktq_difference(w, w + c->stride, c->n * c->k / 2, (struct ktq_difference *)(void *)r->bytes);
}

/* Every function of a table is behind one of these; those that do not take any size want whole tiles. */
static const struct {
    const char *name;
    int (*run)(const struct call *, struct result *);
    int any_size;
} functions[] = {
    {"absmax", run_absmax, 1},
    {"from_bf16", run_from_bf16, 0},
    {"from_fp8", run_from_fp8, 0},
    {"pack", run_pack, 0},
    {"unpack", run_unpack, 0},
    {"group", run_group, 1},
    {"search", run_search, 1},
    {"product", run_product, 1},
    {"silu", run_silu, 1},
    {"factor", run_factor, 1},
    {"feedback", run_feedback, 1},
    {"nibbles_pack", run_nibbles_pack, 1},
    {"nibbles_unpack", run_nibbles_unpack, 1},
    {"nibbles_to_bf16", run_nibbles_to_bf16, 1},
    {"fp8_to_bf16", run_fp8, 1},
    {"f16", run_f16, 1},
    {"f32", run_f32, 1},
    {"difference", run_difference, 1},
};

/* The first is +0 and the rest -0, or the other way round; or zeros at random beside the ends of all bf16. */
static uint16_t edge(size_t j, int kind) {
    static const uint16_t ends[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F};
    if (kind < 2) return j % 32 == 0 ? (uint16_t)(kind << 15) : (uint16_t)(!kind << 15);
    return ends[below(kind == 2 ? 2 : kind == 3 ? 6 : sizeof ends / sizeof *ends)];
}

static void row_of_weights(uint16_t *row, uint8_t *row8, size_t count) {
    /* Rows of all magnitudes, some so small that their inverse scale is infinite, some of nothing but edges. */
    const uint16_t top = (uint16_t)(below(0x7F80)), spread = 0x0400;
    const int kind = (int)below(24); /* below 5: edges */
    for (size_t j = 0; j < count; j++) {
        uint16_t magnitude = top > spread ? (uint16_t)(top - below(spread)) : (uint16_t)below(top + 1u);
        row[j] = kind < 5 ? edge(j, kind) : (uint16_t)(magnitude | (random64() & 1) << 15);
        row8[j] = (uint8_t)(kind < 3 ? row[j] >> 8 : kind == 3 ? random64() & 0x87 : random64());
    }
}

static void inputs(int round, size_t n, size_t stride) {
    for (size_t i = 0; i < n; i++) row_of_weights(w + i * stride, fp8 + i * stride, stride);
    for (size_t i = 0; round % 4 && i < n * stride; i++)
        if ((fp8[i] & 0x7F) == 0x7F) fp8[i] = 0;
    if (round % 4 == 0) w[below(n * stride)] = (uint16_t)(0x7F80 | random64());
    if (round % 16 == 5)
        for (size_t i = 0; i < n * stride; i++) w[i] = (uint16_t)random64(); /* for the f16 conversion: any bits */
    for (size_t i = 0; i < sizeof f32 / sizeof *f32; i++) {
        uint32_t bits = (uint32_t)random64();
        if (below(3) == 0) bits = (bits & 0xFFFF0000u) | 0x8000u; /* halves between two bf16 */
        if (below(8) == 0) bits &= 0x807FFFFFu;                   /* subnormals */
        memcpy(f32 + i, &bits, sizeof bits);
    }
    int exponent = round % 3 == 0 ? (int)below(254) - 126 : -(int)below(12);
    for (size_t i = 0; i < sizeof scale / sizeof *scale; i++) scale[i] = power_of_two(exponent);
}

static void run(const char *isa, size_t function, const struct call *c, struct result *r) {
    memset(r, 0, sizeof *r);
    if (ktq_isa_use(isa) != KTQ_OK) abort(); /* main has looked */
    r->status = functions[function].run(c, r);
}

static int compare(const char *isa, int rounds) {
    static const size_t blocks[][2] = {{128, 128}, {16, 32}, {48, 80}, {1, 1000}, {7, 1}};
    state = 1;
    for (int round = 0; round < rounds; round++) {
        const int bits = round & 1 ? 8 : 4;
        size_t tiles = below(8) ? 1 + below(6) : 55 + below(3); /* beyond a block of 3,584 columns, now and then */
        size_t n = 32 * (1 + below(MOST_ROWS / 32)), k = (bits == 8 ? 64 : 128) * tiles;
        if (k > MOST_COLS - 64) k = 3584 + 128, n = 32;
        const size_t stride = k + below(64), *block = blocks[below(5)];
        inputs(round, n, stride);
        for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
            const int some = (int)below(8);
            struct call c = {bits, some & 1, some & 2, some & 4, n, k, stride, block[0], block[1]};
            if (functions[i].any_size) c.n = 1 + below(n), c.k = 1 + below(k);
            run("scalar", i, &c, &want);
            run(isa, i, &c, &got);
            int failed = want.status == KTQ_NOT_FINITE; /* then only the place counts */
            size_t size = failed ? offsetof(struct result, scales) : sizeof want;
            if (memcmp(&want, &got, size) != 0) {
                printf("%s differs from scalar: %s, round %d, %d bits, [%zu, %zu]\n", isa, functions[i].name, round,
                       bits, c.n, c.k);
                return 1;
            }
        }
    }
    printf("%s equals scalar\n", isa);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: compare ROUNDS ISA...\n"), 2;
    int failures = 0;
    for (int i = 2; i < argc; i++) {
        if (ktq_isa_use(argv[i]) != KTQ_OK) {
            printf("this build or CPU has no %s\n", argv[i]);
            failures++;
        } else {
            failures += compare(argv[i], atoi(argv[1]));
        }
    }
    return failures != 0;
}

/* Every instruction set of a build against its scalar code, bit for bit, through the public interface. For those that
 * this CPU lacks: AVX-512 compiled against simde (tests/native/test_avx512.py), NEON under qemu (make test-neon).
 *
 * Prints one line a set, or what differs; the exit status is 1 if anything does, or if a set was named that this build
 * does not have. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/api.h"

enum { MOST_ROWS = 160, MOST_COLS = 3584 + 3 * 128, MOST = MOST_ROWS * MOST_COLS };

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
    float scales[MOST_ROWS];
    int8_t bytes[2 * MOST];
} want, got;

static void run(int what, int bits, size_t n, size_t k, size_t stride, size_t rows, size_t cols, struct result *r) {
    memset(r, 0, sizeof *r);
    struct ktq_blocks blocks = {scale, stride / cols + 1, rows, cols, rows / 2, cols / 3};
    switch (what) {
    case 0: r->status = ktq_absmax(w, n, k, stride, bits, r->bytes, r->scales, &r->where); break;
    case 1: r->status = ktq_kt_amx_from_bf16(w, n, k, stride, bits, r->bytes, r->scales, &r->where); break;
    case 2: r->status = ktq_kt_amx_from_fp8(fp8, n, k, stride, &blocks, bits, r->bytes, r->scales, &r->where); break;
    case 3: r->status = ktq_kt_amx_pack((const int8_t *)w, n, k, bits, r->bytes); break;
    case 4:
        r->status = ktq_fp8_to_bf16(fp8, n, k, scale, k / cols + 1, rows, cols, (uint16_t *)(void *)r->bytes);
        break;
    case 5: r->status = ktq_f16_to_bf16(w, n * k, (uint16_t *)(void *)r->bytes); break;
    case 6: r->status = ktq_f32_to_bf16(f32, n * k / 8, (uint16_t *)(void *)r->bytes); break;
    default: /* codes, then scales, then zero points; narrow, asymmetric or neither, as the rows of blocks have it */
        r->status = ktq_group(w, n, k, stride, bits, cols + 7, rows % 2 != 0, 1, r->bytes,
                              (float *)(void *)(r->bytes + MOST), rows == 48 ? r->bytes + MOST / 2 * 3 : NULL,
                              &r->where);
    }
}

static void inputs(int round, size_t n, size_t stride) {
    for (size_t i = 0; i < n; i++) {
        /* Rows of all magnitudes, some so small that their inverse scale is infinite, some of nothing but zeros. */
        uint16_t top = (uint16_t)(below(0x7F80)), zeros = below(16) == 0;
        uint16_t spread = 0x0400;
        for (size_t j = 0; j < stride; j++) {
            uint16_t magnitude = top > spread ? (uint16_t)(top - below(spread)) : (uint16_t)below(top + 1u);
            w[i * stride + j] = zeros ? 0x8000 : (uint16_t)(magnitude | (random64() & 1) << 15);
            fp8[i * stride + j] = (uint8_t)(zeros ? 0x80 : random64());
            if (round % 4 && (fp8[i * stride + j] & 0x7F) == 0x7F) fp8[i * stride + j] = 0;
        }
    }
    if (round % 4 == 0) w[below(n * stride)] = (uint16_t)(0x7F80 | random64());
    if (round % 16 == 5)
        for (size_t i = 0; i < n * stride; i++) w[i] = (uint16_t)random64(); /* for the f16 conversion: any bits */
    for (size_t i = 0; i < sizeof f32 / sizeof *f32; i++) {
        uint32_t bits = (uint32_t)random64();
        if (below(3) == 0) bits = (bits & 0xFFFF0000u) | 0x8000u; /* halves between two bf16 */
        memcpy(f32 + i, &bits, sizeof bits);
    }
    int exponent = round % 3 == 0 ? (int)below(254) - 126 : -(int)below(12);
    for (size_t i = 0; i < sizeof scale / sizeof *scale; i++) scale[i] = power_of_two(exponent);
}

static int compare(const char *isa, int rounds) {
    static const char *const names[] = {"absmax", "from_bf16", "from_fp8", "pack", "fp8_to_bf16", "f16", "f32", "group"};
    static const size_t blocks[][2] = {{128, 128}, {16, 32}, {48, 80}, {1, 1000}, {7, 1}};
    state = 1;
    for (int round = 0; round < rounds; round++) {
        int bits = round & 1 ? 8 : 4;
        size_t tiles = below(8) ? 1 + below(6) : 55 + below(3); /* beyond a block of 3,584 columns, now and then */
        size_t n = 32 * (1 + below(MOST_ROWS / 32)), k = (bits == 8 ? 64 : 128) * tiles;
        if (k > MOST_COLS - 64) k = 3584 + 128, n = 32;
        size_t stride = k + below(64);
        const size_t *block = blocks[below(5)];
        inputs(round, n, stride);
        for (int what = 0; what < 8; what++) {
            int any_size = what == 0 || what == 4 || what == 7; /* the others want whole tiles, or a count */
            size_t rows = any_size ? 1 + below(n) : n, cols = any_size ? 1 + below(k) : k;
            if (ktq_isa_use("scalar") != KTQ_OK) return 1;
            run(what, bits, rows, cols, stride, block[0], block[1], &want);
            if (ktq_isa_use(isa) != KTQ_OK) return 1;
            run(what, bits, rows, cols, stride, block[0], block[1], &got);
            int failed = want.status == KTQ_NOT_FINITE; /* then only the place counts */
            size_t size = failed ? offsetof(struct result, scales) : sizeof want;
            if (memcmp(&want, &got, size) != 0) {
                printf("%s differs from scalar: %s, round %d, %d bits, [%zu, %zu]\n", isa, names[what], round, bits,
                       rows, cols);
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

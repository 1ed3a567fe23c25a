/* The search for the scale of one run of weights.
 *
 * With magnitudes m, weights h and codes q(c) = min(rint(m / c), most) of a candidate c, the scale that fits these codes
 * best is N / D, N = sum(h m q), D = sum(h q^2), and leaves the error sum(h m^2) - N^2 / D: the candidate with the
 * largest N^2 / D is best, the first of equals. Codes and scale are then fitted to each other while the score grows. */
#include "search.h"

#include <string.h>

#include "scalar/to_bf16.h"

/* A short run is gone through for each candidate (4.8 ms for a million weights and 16 candidates with AVX2), a long one
 * once, into bins (1.1 ms in rows of 2,048, 0.8 in rows of 7,168, however many candidates). */
enum { LANES = 8, AT_ONCE = 32, ROUNDS = 8, SHORT = 256, BINS = 8 * 128 };

typedef struct fit {
    double score, numerator, denominator;
} fit;

typedef struct run {
    const ktq_table *isa;
    const ktq_search_how *how;
    const uint16_t *w;
    const float *weights; /* or NULL */
    size_t count;
    uint16_t amax;
    float power, largest; /* magnitudes times this power of two are near 1: no sum overflows or vanishes */
} run;

static fit fit_of(double numerator, double denominator) {
    return (fit){denominator > 0 ? numerator * numerator / denominator : 0, numerator, denominator};
}

/* ---- short runs: sums over all weights, in float32 lanes */

static fit direct(const run *r, float *room) {
    const size_t padded = (r->count + LANES - 1) / LANES * LANES;
    const float most = r->how->most;
    float *m = room, *h = room + padded;
    for (size_t j = 0; j < r->count; j++) m[j] = fabsf(ktq_f32_of_bf16(r->w[j])) * r->power;
    for (size_t j = 0; j < r->count; j++) h[j] = r->weights ? r->weights[j] : m[j];
    for (size_t j = r->count; j < padded; j++) m[j] = h[j] = 0.0f;
    fit best = {0, 0, 0};
    for (size_t first = 0; first < r->how->candidates; first += AT_ONCE) {
        const size_t left = r->how->candidates - first, count = left < AT_ONCE ? left : AT_ONCE;
        float inverse[AT_ONCE], sums[2 * AT_ONCE];
        for (size_t i = 0; i < count; i++) inverse[i] = most / (r->how->factors[first + i] * r->largest);
        r->isa->search_sums(m, h, padded, inverse, count, most, sums);
        for (size_t i = 0; i < count; i++) {
            const fit found = fit_of(sums[2 * i], sums[2 * i + 1]);
            if (found.score > best.score) best = found;
        }
    }
    for (int round = 0; round < ROUNDS && best.score > 0; round++) {
        float inverse = (float)(best.denominator / best.numerator), sums[2];
        r->isa->search_sums(m, h, padded, &inverse, 1, most, sums);
        const fit found = fit_of(sums[0], sums[1]);
        if (!(found.score > best.score)) break;
        best = found;
    }
    return best;
}

/* ---- long runs: bf16 has 128 magnitudes an octave, and those that no candidate gives a code but 0 do not matter */

/* Of the bins from each one on: sums of h, and of h m. One more is empty. */
typedef struct tails {
    uint16_t lowest; /* the magnitude, as bits, of the first bin */
    size_t bins;
    double h[BINS + 1], hm[BINS + 1];
} tails;

static float value_of(const run *r, uint32_t bits) { return ktq_f32_of_bits(bits << 16) * r->power; }

/* The first bin whose magnitudes are at least so large. */
static size_t bin_from(const tails *t, float magnitude) {
    const uint32_t bits = (ktq_bits_of_f32(magnitude) + 0xFFFFu) >> 16;
    const size_t bin = bits <= t->lowest ? 0 : bits - t->lowest;
    return bin < t->bins ? bin : t->bins;
}

/* 1 + the bin of a weight; 0 for what lies below all. */
static size_t place_of(uint16_t w, uint16_t lowest) {
    const uint32_t next = (w & 0x7FFFu) + 1u;
    return next > lowest ? next - lowest : 0;
}

static void fill(tails *t, const run *r) {
    const uint32_t least = ktq_bits_of_f32(r->how->factors[0] * r->largest / (4.0f * r->how->most) / r->power) >> 16;
    const uint32_t furthest = r->amax + 1u > BINS ? r->amax + 1u - BINS : 0;
    t->lowest = (uint16_t)(least > furthest ? least : furthest);
    t->bins = r->amax - t->lowest + 1u;
    float sums[BINS + 1]; /* the first takes what lies below the bins, so that no branch has to be guessed */
    memset(sums, 0, (t->bins + 1) * sizeof *sums);
    if (r->weights) {
        for (size_t j = 0; j < r->count; j++) sums[place_of(r->w[j], t->lowest)] += r->weights[j];
    } else {
        uint32_t counts[BINS + 1];
        memset(counts, 0, (t->bins + 1) * sizeof *counts);
        for (size_t j = 0; j < r->count; j++) counts[place_of(r->w[j], t->lowest)]++;
        for (size_t b = 0; b < t->bins; b++) sums[b + 1] = (float)counts[b + 1] * value_of(r, t->lowest + (uint32_t)b);
    }
    t->h[t->bins] = t->hm[t->bins] = 0;
    for (size_t b = t->bins; b-- > 0;) {
        t->h[b] = t->h[b + 1] + sums[b + 1];
        t->hm[b] = t->hm[b + 1] + (double)sums[b + 1] * value_of(r, t->lowest + (uint32_t)b);
    }
}

/* A code q is the sum of ones up to it, and q^2 that of the odd numbers. */
static fit of_scale(const tails *t, const run *r, float scale) {
    double numerator = 0, denominator = 0;
    for (int q = 1; q <= (int)r->how->most; q++) {
        const size_t bin = bin_from(t, ((float)q - 0.5f) * scale / r->power);
        numerator += t->hm[bin];
        denominator += (2 * q - 1) * t->h[bin];
    }
    return fit_of(numerator, denominator);
}

static fit binned(const run *r) {
    tails t;
    fill(&t, r);
    fit best = {0, 0, 0};
    for (size_t i = 0; i < r->how->candidates; i++) {
        const fit found = of_scale(&t, r, r->how->factors[i] * r->largest / r->how->most);
        if (found.score > best.score) best = found;
    }
    for (int round = 0; round < ROUNDS && best.score > 0; round++) {
        const fit found = of_scale(&t, r, (float)(best.numerator / best.denominator));
        if (!(found.score > best.score)) break;
        best = found;
    }
    return best;
}

int ktq_search_run(const ktq_table *isa, const uint16_t *w, size_t count, const float *weights,
                   const ktq_search_how *how, float *room, int8_t *codes, float *scale) {
    run r = {isa, how, w, weights, count, isa->bf16_amax(w, count), 1.0f, 0.0f};
    if (r.amax >= KTQ_BF16_INF) return KTQ_NOT_FINITE;
    int exponent;
    frexpf(ktq_f32_of_bf16(r.amax), &exponent);
    r.power = ldexpf(1.0f, exponent > 126 ? -126 : exponent < -126 ? 126 : -exponent);
    r.largest = ktq_f32_of_bf16(r.amax) * r.power;
    const fit best = !r.amax ? (fit){0, 0, 0} : count <= SHORT ? direct(&r, room) : binned(&r);
    /* Where no weight that counts has a code, the largest decides. */
    const float fitted = best.score > 0 ? (float)(best.numerator / best.denominator) : r.largest / how->most;
    *scale = fitted / r.power / how->step;
    if (how->bf16_scales) *scale = ktq_f32_of_bf16(ktq_bf16_of_f32(*scale));
    const float inverse = ktq_inverse(*scale * how->step);
    (isfinite(inverse) ? isa : &ktq_scalar_table)->codes_i8(w, count, inverse, codes);
    const int8_t most = (int8_t)how->most;
    for (size_t j = 0; j < count; j++) codes[j] = codes[j] > most ? most : codes[j] < -most ? (int8_t)-most : codes[j];
    return KTQ_OK;
}

/* How far two runs of bf16 weights are apart. */
#ifndef KTQ_DIFFERENCE_H
#define KTQ_DIFFERENCE_H

#include "../table.h"
#include "absmax.h"

/* Sums are kept in eight lanes, which are added in one order, so that they are the same however wide a vector is; with
 * more, five sums would not fit into AVX2's registers. Squares and products of bf16 are exact in a double. */
enum { KTQ_LANES = 8 };

typedef struct ktq_lanes {
    double first[KTQ_LANES], second[KTQ_LANES], product[KTQ_LANES], square[KTQ_LANES], largest[KTQ_LANES];
} ktq_lanes;

static inline void ktq_difference_lane(uint16_t a, uint16_t b, size_t lane, ktq_lanes *sums) {
    const double x = ktq_f32_of_bf16(a), y = ktq_f32_of_bf16(b), apart = x - y, size = fabs(apart);
    sums->first[lane] += x * x;
    sums->second[lane] += y * y;
    sums->product[lane] += x * y;
    sums->square[lane] += apart * apart;
    if (size > sums->largest[lane]) sums->largest[lane] = size;
}

/* The last weights, fewer than there are lanes, and the sums over all lanes. */
static inline void ktq_difference_end(const uint16_t *a, const uint16_t *b, size_t count, ktq_lanes *sums,
                                      struct ktq_difference *total) {
    for (size_t lane = 0; lane < count; lane++) ktq_difference_lane(a[lane], b[lane], lane, sums);
    for (size_t lane = 0; lane < KTQ_LANES; lane++) {
        total->first += sums->first[lane];
        total->second += sums->second[lane];
        total->product += sums->product[lane];
        total->square += sums->square[lane];
        if (sums->largest[lane] > total->largest) total->largest = sums->largest[lane];
    }
}

#endif

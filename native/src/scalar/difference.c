#include "difference.h"

void ktq_scalar_difference(const uint16_t *a, const uint16_t *b, size_t count, struct ktq_difference *total) {
    ktq_lanes sums = {{0}, {0}, {0}, {0}, {0}};
    const size_t whole = count / KTQ_LANES * KTQ_LANES;
    for (size_t i = 0; i < whole; i++) ktq_difference_lane(a[i], b[i], i % KTQ_LANES, &sums);
    ktq_difference_end(a + whole, b + whole, count - whole, &sums, total);
}

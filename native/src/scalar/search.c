/* What a search asks for each candidate scale. */
#include "absmax.h"
#include "../table.h"

/* sums[2 i] = sum(h m q) and sums[2 i + 1] = sum(h q^2) for the codes q = min(rint(m * inverse[i]), most) of magnitudes
 * m[count]; count is a multiple of 8. The sums of every eighth number are added as a tree, (0+4)+(2+6) and (1+5)+(3+7):
 * that is what eight lanes give. */
void ktq_scalar_search_sums(const float *m, const float *h, size_t count, const float *inverse, size_t candidates,
                            float most, float *sums) {
    for (size_t i = 0; i < candidates; i++) {
        float n[8] = {0}, d[8] = {0};
        for (size_t j = 0; j < count; j += 8)
            for (size_t lane = 0; lane < 8; lane++) {
                const float x = m[j + lane] * inverse[i];
                const float q = rintf(x < most ? x : most), hq = h[j + lane] * q;
                n[lane] += hq * m[j + lane];
                d[lane] += hq * q;
            }
        sums[2 * i] = ((n[0] + n[4]) + (n[2] + n[6])) + ((n[1] + n[5]) + (n[3] + n[7]));
        sums[2 * i + 1] = ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
    }
}

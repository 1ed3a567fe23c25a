/* What a search asks for each candidate scale, two of them in one pass: eight lanes each, in two halves. */
#include <arm_neon.h>

#include "../table.h"

enum { TOGETHER = 2 };

static inline float tree(const float32x4_t v[2]) {
    const float32x4_t four = vaddq_f32(v[0], v[1]);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline __attribute__((always_inline)) void sums_of(const float *m, const float *h, size_t count,
                                                          const float *inverse, const int together, float most,
                                                          float *sums) {
    const float32x4_t top = vdupq_n_f32(most);
    float32x4_t n[TOGETHER][2], d[TOGETHER][2];
    for (int i = 0; i < together; i++) n[i][0] = n[i][1] = d[i][0] = d[i][1] = vdupq_n_f32(0.0f);
    for (size_t j = 0; j < count; j += 8)
        for (int half = 0; half < 2; half++) {
            const float32x4_t weight = vld1q_f32(h + j + 4 * half), magnitude = vld1q_f32(m + j + 4 * half);
            for (int i = 0; i < together; i++) {
                const float32x4_t q = vrndnq_f32(vminq_f32(vmulq_n_f32(magnitude, inverse[i]), top));
                const float32x4_t hq = vmulq_f32(weight, q);
                n[i][half] = vaddq_f32(n[i][half], vmulq_f32(hq, magnitude));
                d[i][half] = vaddq_f32(d[i][half], vmulq_f32(hq, q));
            }
        }
    for (int i = 0; i < together; i++) {
        sums[2 * i] = tree(n[i]);
        sums[2 * i + 1] = tree(d[i]);
    }
}

void ktq_neon_search_sums(const float *m, const float *h, size_t count, const float *inverse, size_t candidates,
                          float most, float *sums) {
    size_t i = 0;
    for (; i + TOGETHER <= candidates; i += TOGETHER) sums_of(m, h, count, inverse + i, TOGETHER, most, sums + 2 * i);
    for (; i < candidates; i++) sums_of(m, h, count, inverse + i, 1, most, sums + 2 * i);
}

/* The grid of one group, from its smallest and largest weight: shared by every instruction set. */
#ifndef KTQ_GROUP_H
#define KTQ_GROUP_H

#include "../table.h"
#include "to_bf16.h"

typedef struct ktq_step {
    float inverse;
    int zero, lowest, highest;
} ktq_step;

/* low and high are the group's extremes. Symmetric: the range is 2^bits - 1 steps wide around zero, as
 * compressed-tensors has it, so the largest weight lies half a step outside; narrow, one step less wide, so the largest
 * weight is the highest code or its negative: a scale rounded to bf16 puts it at 7.03 of 4 bits at most, and clamping
 * is for scales below bf16's normal numbers alone. Asymmetric: from low to high, with zero in between, and a zero point
 * that makes it exact. */
static inline ktq_step ktq_group_step(float low, float high, const ktq_grid *grid, float *scale) {
    const int half = 1 << (grid->bits - 1);
    const int lowest = grid->narrow ? 1 - half : -half;
    const double steps = half - 1 - lowest;
    ktq_step step = {0.0f, 0, lowest, half - 1};
    double range;
    low += 0.0f, high += 0.0f; /* no -0: which zero of a group is its extreme depends on the order of comparisons */
    if (grid->symmetric) {
        range = 2.0 * (-low > high ? -low : high);
    } else {
        low = low < 0.0f ? low : 0.0f;
        high = high > 0.0f ? high : 0.0f;
        range = (double)high - low;
    }
    *scale = (float)(range / steps);
    if (grid->bf16_scales) *scale = ktq_f32_of_bf16(ktq_bf16_of_f32(*scale));
    step.inverse = ktq_inverse(*scale);
    if (!grid->symmetric && *scale != 0.0f) {
        double zero = rint(-half - (double)low / *scale);
        step.zero = (int)(zero < -half ? -half : zero > half - 1 ? half - 1 : zero);
    }
    return step;
}

static inline int8_t ktq_group_code(float w, const ktq_step *step) {
    float x = w * step->inverse; /* NaN where the inverse is infinite and the weight zero */
    int code = step->zero + (isnan(x) ? 0 : x > 512.0f ? 512 : x < -512.0f ? -512 : (int)rintf(x));
    return (int8_t)(code < step->lowest ? step->lowest : code > step->highest ? step->highest : code);
}

#endif

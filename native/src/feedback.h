/* Second moments, and codes with error feedback: what every instruction set does around its products. */
#ifndef KTQ_FEEDBACK_H
#define KTQ_FEEDBACK_H

#include "table.h"

enum { KTQ_BLOCK = 64, KTQ_ROWS = 32 };

int ktq_factor_with(const ktq_table *isa, float *h, size_t k, double damping, double *room);

typedef struct ktq_feedback_how {
    const uint32_t *order;
    const float *factor;
    size_t k, group, groups;
    float most, step;
} ktq_feedback_how;

/* n is KTQ_ROWS at most. */
void ktq_feedback_rows(const ktq_table *isa, const uint16_t *w, size_t n, size_t stride, const ktq_feedback_how *how,
                       const float *scales, float *room, int8_t *codes);

double ktq_exp(double x);

#endif

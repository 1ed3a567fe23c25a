/* The search for the scale of one run of weights: what every instruction set does around its sums. */
#ifndef KTQ_SEARCH_H
#define KTQ_SEARCH_H

#include "table.h"

typedef struct ktq_search_how {
    const float *factors; /* of the scale at which the largest weight is the highest code */
    size_t candidates;
    float most, step; /* the highest code; value = code * step * scale */
    int bf16_scales;
} ktq_search_how;

/* weights[count] or NULL; room is for two times count floats, each rounded up to eight. */
int ktq_search_run(const ktq_table *isa, const uint16_t *w, size_t count, const float *weights,
                   const ktq_search_how *how, float *room, int8_t *codes, float *scale);

#endif

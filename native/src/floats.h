/* The floating-point environment that the kernels count on. A thread may come with another one: a caller, or a library
 * that was built with fast-math, may have it round to another side or take subnormals for zeros, and instruction sets
 * differ in what heeds that. */
#ifndef KTQ_FLOATS_H
#define KTQ_FLOATS_H

#include <fenv.h>

static inline fenv_t ktq_set_floats(void) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    return callers;
}

static inline void ktq_restore_floats(const fenv_t *callers) { fesetenv(callers); }

/* The first line of every public function that computes: from here to its end the environment is the default one. */
#define KTQ_DEFAULT_FLOATS __attribute__((cleanup(ktq_restore_floats))) const fenv_t callers_floats = ktq_set_floats()

#endif

/* The public declarations, once: cffi reads ktq_api.h too and knows no include guards. */
#ifndef KTQ_API_GUARD_H
#define KTQ_API_GUARD_H

#if defined(__FAST_MATH__) || defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__                                    \
    || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "ktforge's kernels give the same bits everywhere, which -ffast-math and its parts do not: take them from CFLAGS"
#endif

#include <stddef.h>
#include <stdint.h>

#include "../include/ktq_api.h"
#include "target.h"

#endif

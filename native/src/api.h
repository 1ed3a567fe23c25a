/* The public declarations, once: cffi reads ktq_api.h too and knows no include guards. */
#ifndef KTQ_API_GUARD_H
#define KTQ_API_GUARD_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ktq_api.h"

#endif

/* Functions that do nothing, one for each name of a table: compare.c must notice (tests/native/test_compare.py). */
#include "../src/table.h"

#define BROKEN(isa, result, name, parameters)                                                                         \
    result ktq_broken_##name parameters;                                                                              \
    result ktq_broken_##name parameters { return (result)0; }

KTQ_FUNCTIONS(BROKEN, )

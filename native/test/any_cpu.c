/* In place of src/cpu.c where the instructions are emulated: every set of the build may be used. */
#include "../src/cpu.h"

int ktq_cpu_has_avx2(void) { return 1; }
int ktq_cpu_has_avx512(void) { return 1; }

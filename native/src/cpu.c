/* What the CPU offers (cpuid) and the operating system saves across a context switch (xgetbv). */
#include "cpu.h"

#include "target.h"

#if defined(KTQ_X86_64)

#include <cpuid.h>
#include <stdint.h>

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

int ktq_cpu_has_avx2(void) {
    const uint32_t f16c = 1u << 29, osxsave = 1u << 27, avx = 1u << 28, need = f16c | osxsave | avx;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & need) != need) return 0;
    if ((xcr0() & 0x6) != 0x6) return 0; /* XMM and YMM state */
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & (1u << 5)) != 0;
}

int ktq_cpu_has_avx512(void) {
    const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, need = f | dq | bw | vl;
    unsigned eax, ebx, ecx, edx;
    if (!ktq_cpu_has_avx2()) return 0; /* that folder's functions do the ends of rows, and it checks OSXSAVE */
    if ((xcr0() & 0xE6) != 0xE6) return 0; /* mask registers and both halves of ZMM state beside XMM and YMM */
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & need) == need;
}

#else

int ktq_cpu_has_avx2(void) { return 0; }
int ktq_cpu_has_avx512(void) { return 0; }

#endif

#ifndef KTQ_CPU_H
#define KTQ_CPU_H

/* Whether this CPU has, and this operating system saves, what the folder of that name is compiled for. */
int ktq_cpu_has_avx2(void);
int ktq_cpu_has_avx512(void);

#endif

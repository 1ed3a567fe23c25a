#ifndef KTQ_CPU_H
#define KTQ_CPU_H

/* Whether this CPU has, and this operating system saves, what the avx2 folder is compiled for. */
int ktq_cpu_has_avx2(void);

#endif

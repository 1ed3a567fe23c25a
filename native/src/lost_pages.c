/* Survives a mapped file that is cut short while it is read. The kernel says so with SIGBUS at the page that is gone;
 * the handler puts a page of zeros there and counts, and the reader goes on. Whether what it read counts is for the
 * caller to decide: a handler can neither raise an error nor unwind a kernel. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "api.h"

static atomic_size_t lost;
static struct sigaction before;
static uintptr_t page_size;

/* mmap is not on POSIX's list of what a handler may call; on Linux and macOS it is a plain system call. */
static void put_zeros(int signal_number, siginfo_t *info, void *context) {
    (void)context;
    const int saved = errno;
    void *page = (void *)((uintptr_t)info->si_addr & ~(page_size - 1));
    if (info->si_code == BUS_ADRERR && mmap(page, page_size, PROT_READ | PROT_WRITE,
                                            MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
        atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed);
    else { /* another's affair: an access happens again, and a signal that was sent is sent again */
        sigaction(signal_number, &before, NULL);
        if (info->si_code <= 0) raise(signal_number);
    }
    errno = saved;
}

int ktq_catch_lost_pages(int on) {
    if (!on) return sigaction(SIGBUS, &before, NULL) == 0 ? KTQ_OK : KTQ_NO_HANDLER;
    struct sigaction action = {.sa_sigaction = put_zeros, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    return sigaction(SIGBUS, &action, &before) == 0 ? KTQ_OK : KTQ_NO_HANDLER;
}

size_t ktq_lost_pages(void) { return atomic_load_explicit(&lost, memory_order_relaxed); }

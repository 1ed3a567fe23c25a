/* Survives a mapped file that is cut short while it is read. The kernel says so with SIGBUS at the page that is gone;
 * the handler puts zeros there and counts, and the reader goes on. Whether what it read counts is for the caller to
 * decide: a handler can neither raise an error nor unwind a kernel.
 *
 * It acts on reads of registered ranges and passes on everything else. The zeros reach to the end of the range: what
 * lies behind a page that is gone is of no use either, and so one mapping becomes two, however many pages are gone.
 * One for each would soon be more than Linux allows a process (65,530). */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "api.h"

/* As many as Linux allows mappings, so there is room for every file that can be mapped. */
enum { MOST_RANGES = 1 << 16 };

/* Values of a range's start, where no mapping begins. */
enum { FREE = 0, TAKEN = 1 };

static struct range {
    atomic_uintptr_t start, end;
    atomic_uintptr_t zeros; /* where they begin; the end if no page is gone */
} ranges[MOST_RANGES];

static atomic_size_t lost;
static atomic_int catching;
static struct sigaction before;
static int buried; /* under a handler that came later, at the last ktq_catch_lost_pages(0) */

static uintptr_t page_size(void) { return (uintptr_t)sysconf(_SC_PAGESIZE); }

/* The range that an address is in, or NULL. Its start is read twice: the place may get another range meanwhile. */
static struct range *range_of(uintptr_t address) {
    for (struct range *range = ranges; range < ranges + MOST_RANGES; range++) {
        const uintptr_t start = atomic_load(&range->start);
        if (start > TAKEN && start <= address && address < atomic_load(&range->end)
            && atomic_load(&range->start) == start)
            return range;
    }
    return NULL;
}

/* Where this cannot tell, the zeros being read-only turns a write into a SIGSEGV. */
static int is_write(const void *context) {
#if defined(KTQ_X86_64) && defined(__linux__)
    return (((const ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
    (void)context;
    return 0;
#endif
}

/* Counts before anybody can read a zero: whoever has read one finds the count changed. A page that two threads miss at
 * once may count twice. mmap is not on POSIX's list of what a handler may call; on Linux and macOS it is a plain system
 * call. */
static int put_zeros(struct range *range, uintptr_t address) {
    const uintptr_t size = page_size(), page = address & ~(size - 1), end = atomic_load(&range->end);
    uintptr_t zeros = atomic_load(&range->zeros);
    while (page < zeros && !atomic_compare_exchange_weak(&range->zeros, &zeros, page)) continue;
    atomic_fetch_add(&lost, page < zeros ? (zeros - page) / size : 1);
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap((void *)page, end - page, PROT_READ, flags, -1, 0) != MAP_FAILED;
}

/* As the system would end the process by itself: once the handler is left, with all that it said of the signal. */
static void end_process(int number, siginfo_t *info) {
    sigaction(number, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
#if defined(__linux__)
    syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), number, info);
#else
    (void)info;
    raise(number);
#endif
}

/* What would have happened without this handler. */
static void pass_on(int number, siginfo_t *info, void *context) {
    const struct sigaction next = before;
    const int was_sent = info->si_code <= 0;
    if (next.sa_handler == SIG_IGN && was_sent) return;
    if (next.sa_handler == SIG_DFL || next.sa_handler == SIG_IGN) {
        end_process(number, info);
        return;
    }
    if ((unsigned)next.sa_flags & SA_RESETHAND) sigaction(number, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    if (next.sa_flags & SA_SIGINFO)
        next.sa_sigaction(number, info, context);
    else
        next.sa_handler(number);
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const int saved = errno;
    struct range *range = NULL;
    if (atomic_load(&catching) && info->si_code == BUS_ADRERR && !is_write(context))
        range = range_of((uintptr_t)info->si_addr);
    if (!range || !put_zeros(range, (uintptr_t)info->si_addr)) pass_on(number, info, context);
    errno = saved;
}

static int is_ours(const struct sigaction *action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus_error;
}

static int is_function(const struct sigaction *action) {
    return action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN;
}

static int status_of(int failed) { return failed ? KTQ_NO_HANDLER : KTQ_OK; }

/* A handler that came later stays where it is, and with it this one, passing everything on. It is trusted to hand on
 * what is not its own, as this one does: installed once more above it, each would pass to the other for ever. */
int ktq_catch_lost_pages(int on) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) != 0) return KTQ_NO_HANDLER;
    atomic_store(&catching, on);
    if (!on) {
        buried = !is_ours(&now);
        return status_of(!buried && sigaction(SIGBUS, &before, NULL) != 0);
    }
    if (is_ours(&now) || (buried && is_function(&now))) return KTQ_OK;
    before = now;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_mask = before.sa_mask};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | (before.sa_flags & (SA_NODEFER | SA_RESTART));
    return status_of(sigaction(SIGBUS, &action, NULL) != 0);
}

int ktq_lost_pages_watch(const void *start, size_t size) {
    const uintptr_t page = page_size(), first = (uintptr_t)start & ~(page - 1);
    const uintptr_t end = ((uintptr_t)start + size + page - 1) & ~(page - 1);
    for (struct range *range = ranges; range < ranges + MOST_RANGES; range++) {
        uintptr_t expected = FREE;
        if (atomic_load(&range->start) != FREE || !atomic_compare_exchange_strong(&range->start, &expected, TAKEN))
            continue;
        atomic_store(&range->end, end);
        atomic_store(&range->zeros, end);
        atomic_store(&range->start, first);
        return KTQ_OK;
    }
    return KTQ_TOO_MANY;
}

void ktq_lost_pages_unwatch(const void *start) {
    struct range *range = range_of((uintptr_t)start);
    if (range) atomic_store(&range->start, FREE);
}

size_t ktq_lost_pages_of(const void *start) {
    const struct range *range = range_of((uintptr_t)start);
    return range ? (atomic_load(&range->end) - atomic_load(&range->zeros)) / page_size() : 0;
}

size_t ktq_lost_pages(void) { return atomic_load(&lost); }

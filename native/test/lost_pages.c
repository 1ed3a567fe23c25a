/* What becomes of a SIGBUS, one case a process: lost_pages CASE FILE. Ends with 0 if all is as it should be, with 1 and
 * a line if not, or by SIGBUS where the case means that (tests/native/test_lost_pages.py). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../src/api.h"

#define PAGE ((size_t)sysconf(_SC_PAGESIZE))

enum { MANY = 200000, THREADS = 8 };

static const char *path;
static sigjmp_buf back;
static volatile siginfo_t seen;
static volatile int calls;

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) printf("line %d: %s\n", __LINE__, #condition), exit(1);                                     \
    } while (0)

/* A mapping of so many pages, all gone. */
static volatile char *gone(size_t pages, int protection, int watched) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0 && ftruncate(file, (off_t)(pages * PAGE)) == 0);
    char *mapped = mmap(NULL, pages * PAGE, protection, MAP_PRIVATE, file, 0);
    CHECK(mapped != MAP_FAILED && ftruncate(file, 0) == 0 && close(file) == 0);
    if (watched) CHECK(ktq_lost_pages_watch(mapped, pages * PAGE) == KTQ_OK);
    return mapped;
}

static size_t mappings(void) {
    size_t lines = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    for (int c; (c = getc(maps)) != EOF;) lines += c == '\n';
    fclose(maps);
    return lines;
}

static void note(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    memcpy((void *)&seen, info, sizeof *info);
    calls++;
    if (info->si_code > 0) siglongjmp(back, 1);
}

static void note_plainly(int number) {
    (void)number;
    calls++;
    siglongjmp(back, 1);
}

static void handle(void (*function)(int, siginfo_t *, void *), int flags) {
    struct sigaction action = {.sa_sigaction = function, .sa_flags = SA_SIGINFO | flags};
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
}

static int handles(void (*function)(int, siginfo_t *, void *)) {
    struct sigaction now;
    CHECK(sigaction(SIGBUS, NULL, &now) == 0);
    return now.sa_sigaction == function;
}

static void catch (int on) { CHECK(ktq_catch_lost_pages(on) == KTQ_OK); }

/* Reads a page that nobody watches; whether a handler of this file got the signal, for that address. */
static int passes_on(void) {
    volatile char *mapped = gone(3, PROT_READ, 0);
    const int before = calls;
    if (sigsetjmp(back, 1) == 0) return (void)mapped[PAGE], 0;
    return calls == before + 1 && seen.si_code == BUS_ADRERR && seen.si_addr == (void *)(mapped + PAGE);
}

static void case_scattered(void) { /* from the end, so that no page is zeros already */
    volatile char *mapped = gone(MANY, PROT_READ, 1);
    catch (1);
    const size_t before = mappings();
    for (size_t page = MANY; page >= 2; page -= 2) CHECK(mapped[(page - 1) * PAGE] == 0);
    CHECK(ktq_lost_pages() == MANY - 1 && ktq_lost_pages_of((void *)mapped) == MANY - 1);
    CHECK(mappings() <= before + 1);
}

static void *read_all(void *mapped) {
    size_t sum = 0;
    for (size_t page = 1000; page-- > 0;) sum += ((volatile unsigned char *)mapped)[page * PAGE];
    return (void *)(sum + ktq_lost_pages_of(mapped));
}

static void case_threads(void) { /* what one of them reads as zero, it finds counted */
    catch (1);
    for (int round = 0; round < 20; round++) {
        volatile char *mapped = gone(1000, PROT_READ, 1);
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++) CHECK(pthread_create(threads + i, NULL, read_all, (void *)mapped) == 0);
        for (int i = 0; i < THREADS; i++) {
            void *result;
            CHECK(pthread_join(threads[i], &result) == 0 && result == (void *)1000);
        }
        ktq_lost_pages_unwatch((void *)mapped);
    }
    CHECK(ktq_lost_pages() >= 20 * 1000);
}

static void case_before(void) {
    handle(note, 0);
    catch (1);
    CHECK(passes_on() && passes_on() && ktq_lost_pages() == 0);
    CHECK(sigqueue(getpid(), SIGBUS, (union sigval){.sival_int = 7}) == 0);
    CHECK(calls == 3 && seen.si_code == SI_QUEUE && seen.si_value.sival_int == 7);
    CHECK(gone(2, PROT_READ, 1)[0] == 0 && ktq_lost_pages() == 2 && calls == 3);
    catch (0);
    CHECK(handles(note) && passes_on());
}

static void case_before_plain(void) {
    signal(SIGBUS, note_plainly);
    catch (1);
    volatile char *mapped = gone(1, PROT_READ, 0);
    if (sigsetjmp(back, 1) == 0) (void)mapped[0];
    CHECK(calls == 1);
}

static void case_masks(void) { /* another signal that the handler before has blocked is blocked in it here, too */
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO};
    sigaddset(&action.sa_mask, SIGUSR1);
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
    catch (1);
    struct sigaction now;
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && sigismember(&now.sa_mask, SIGUSR1));
}

static void case_write(void) {
    handle(note, 0);
    catch (1);
    volatile char *mapped = gone(2, PROT_READ | PROT_WRITE, 1);
    if (sigsetjmp(back, 1) == 0) mapped[0] = 1;
    CHECK(calls == 1 && seen.si_code == BUS_ADRERR && ktq_lost_pages() == 0);
}

static void case_unwatched(void) {
    handle(note, 0);
    catch (1);
    volatile char *mapped = gone(2, PROT_READ, 1);
    ktq_lost_pages_unwatch((void *)mapped);
    if (sigsetjmp(back, 1) == 0) (void)mapped[0];
    CHECK(calls == 1 && ktq_lost_pages() == 0);
}

static void case_off(void) {
    handle(note, 0);
    catch (1);
    catch (0);
    volatile char *mapped = gone(2, PROT_READ, 1);
    if (sigsetjmp(back, 1) == 0) (void)mapped[0];
    CHECK(calls == 1 && ktq_lost_pages() == 0);
}

static struct sigaction earlier; /* what a well-behaved handler in between passes on to */

static void between(int number, siginfo_t *info, void *context) {
    calls += 100;
    earlier.sa_sigaction(number, info, context);
}

static void case_between(void) {
    handle(note, 0);
    catch (1);
    CHECK(sigaction(SIGBUS, NULL, &earlier) == 0);
    handle(between, 0);
    catch (0);
    CHECK(handles(between));
    calls = 0;
    catch (1); /* each passing on to the other, this would never end */
    volatile char *mapped = gone(1, PROT_READ, 0);
    if (sigsetjmp(back, 1) == 0) (void)mapped[0];
    CHECK(calls == 101);
    CHECK(gone(1, PROT_READ, 1)[0] == 0 && ktq_lost_pages() == 1);
    catch (0);
    CHECK(handles(between) && sigaction(SIGBUS, &earlier, NULL) == 0); /* it leaves, as it came */
    catch (1);
    CHECK(gone(1, PROT_READ, 1)[0] == 0 && ktq_lost_pages() == 2);
    catch (0);
    CHECK(handles(note) && passes_on());
}

static void case_gone_between(void) { /* somebody took it away */
    catch (1);
    signal(SIGBUS, SIG_DFL);
    catch (0);
    catch (1);
    CHECK(gone(1, PROT_READ, 1)[0] == 0);
}

static void case_full(void) {
    char *start = mmap(NULL, PAGE << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(start != MAP_FAILED);
    for (size_t i = 0; i < 1 << 16; i++) CHECK(ktq_lost_pages_watch(start + i * PAGE, PAGE) == KTQ_OK);
    CHECK(ktq_lost_pages_watch(&start, 1) == KTQ_TOO_MANY);
    ktq_lost_pages_unwatch(start + 5 * PAGE);
    volatile char *mapped = gone(1, PROT_READ, 1);
    catch (1);
    CHECK(mapped[0] == 0 && ktq_lost_pages_of((void *)mapped) == 1);
}

/* The rest ends by SIGBUS. */

static void case_ends_default(void) {
    catch (1);
    (void)gone(1, PROT_READ, 0)[0];
}

static void case_ends_ignored(void) {
    signal(SIGBUS, SIG_IGN);
    catch (1);
    kill(getpid(), SIGBUS); /* which is ignored */
    (void)gone(1, PROT_READ, 0)[0];
}

static void case_ends_sent(void) {
    catch (1);
    kill(getpid(), SIGBUS);
}

static void fall_through(int number, siginfo_t *info, void *context) { (void)number, (void)info, (void)context; }

static void case_ends_once(void) { /* a handler for one time, which returns to have the process ended */
    handle(fall_through, (int)SA_RESETHAND);
    catch (1);
    (void)gone(1, PROT_READ, 0)[0];
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"scattered", case_scattered}, {"threads", case_threads}, {"before", case_before},
        {"before_plain", case_before_plain}, {"masks", case_masks}, {"write", case_write},
        {"unwatched", case_unwatched}, {"off", case_off}, {"between", case_between},
        {"gone_between", case_gone_between}, {"full", case_full}, {"ends_default", case_ends_default},
        {"ends_ignored", case_ends_ignored}, {"ends_sent", case_ends_sent}, {"ends_once", case_ends_once},
    };
    if (argc != 3) return 2;
    path = argv[2];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(cases[i].name, argv[1]) == 0) return cases[i].run(), 0;
    return 2;
}

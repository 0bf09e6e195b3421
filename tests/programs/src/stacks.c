/* Stacks and signals: handlers that run while a fault is being answered, alternate stacks and stacks of one's
   own in memory that is not resident, coroutines, deep recursion, a write barrier made of mprotect and
   SIGSEGV. Usage: stacks BALLAST_MIB ROUNDS */
#include "common.h"
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

static char *data; /* what handlers touch */
#define DATA_PAGES 2048
static volatile sig_atomic_t ticks;
static volatile int bad;
static size_t absent;

static void on_tick(int sig) {
    (void)sig;
    size_t p = mix(ticks) % DATA_PAGES;
    if (check_page(data + p * PAGE, 500 + p) != WORDS) bad = 1;
    fill_page(data + p * PAGE, 500 + p);
    ticks++;
}
static void timer(int on) {
    struct itimerval every = {{0, on ? 700 : 0}, {0, on ? 700 : 0}};
    setitimer(ITIMER_REAL, &every, NULL);
}
static uint64_t dive(int depth, uint64_t x) {
    volatile uint64_t frame[100];
    for (int i = 0; i < 100; i++) frame[i] = x + i;
    uint64_t below = depth ? dive(depth - 1, mix(x)) : 0;
    uint64_t sum = below;
    for (int i = 0; i < 100; i++) { if (frame[i] != x + i) FAIL("a stack frame changed"); sum += frame[i]; }
    return sum;
}
static void *diver(void *arg) {
    uint64_t a = dive(3000, (uintptr_t)arg);
    press();
    return (void *)(uintptr_t)(a ^ dive(3000, (uintptr_t)arg) ^ a);
}
static ucontext_t back, away;
static uint64_t coroutine_sum;
static void coroutine(void) {
    for (uint64_t i = 0;; i++) { coroutine_sum += dive(20, i); swapcontext(&away, &back); }
}
static char *guarded;
#define GUARDED_PAGES 512
static volatile sig_atomic_t barrier_hits;
static void on_segv(int sig, siginfo_t *info, void *context) {
    (void)sig; (void)context;
    char *page = (char *)((uintptr_t)info->si_addr & ~(PAGE - 1));
    if (page < guarded || page >= guarded + GUARDED_PAGES * PAGE)
        FAIL("a segmentation fault at %p", info->si_addr);
    mprotect(page, PAGE, PROT_READ | PROT_WRITE);
    barrier_hits++;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    int rounds = atoi(argv[2]);
    data = map_pages(DATA_PAGES);
    for (size_t i = 0; i < DATA_PAGES; i++) fill_page(data + i * PAGE, 500 + i);
    size_t stack_pages = 256;
    char *alternate = map_pages(stack_pages);
    guarded = map_pages(GUARDED_PAGES);
    for (size_t i = 0; i < GUARDED_PAGES; i++) fill_page(guarded + i * PAGE, 900 + i);
    ballast(strtoul(argv[1], NULL, 0) * MIB);

    stack_t ss = {.ss_sp = alternate, .ss_size = stack_pages * PAGE};
    CHECK(sigaltstack(&ss, NULL) == 0);
    struct sigaction tick = {.sa_handler = on_tick, .sa_flags = SA_ONSTACK | SA_RESTART};
    CHECK(sigaction(SIGALRM, &tick, NULL) == 0);
    struct sigaction segv = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaction(SIGSEGV, &segv, NULL) == 0);
    uint64_t answer = 0;
    for (int round = 0; round < rounds; round++) {
        press();
        absent += absent_pages(alternate, stack_pages) + absent_pages(data, DATA_PAGES);
        raise(SIGALRM); /* the kernel writes the frame into an absent alternate stack */
        timer(1);
        press(); /* handlers interrupt a thread that waits for a page */
        timer(0);
        CHECK(!bad);
        /* threads on stacks from the heap */
        pthread_t t[4];
        char *stacks = map_pages(4 * 1024);
        for (int i = 0; i < 4; i++) {
            pthread_attr_t attr;
            pthread_attr_init(&attr);
            CHECK(pthread_attr_setstack(&attr, stacks + i * 1024 * PAGE, 1024 * PAGE) == 0);
            CHECK(pthread_create(&t[i], &attr, diver, (void *)(uintptr_t)(i + round)) == 0);
            pthread_attr_destroy(&attr);
        }
        for (int i = 0; i < 4; i++) {
            void *sum;
            pthread_join(t[i], &sum);
            answer = mix(answer ^ (uintptr_t)sum);
        }
        munmap(stacks, 4 * 1024 * PAGE);
        /* coroutines */
        char *own = map_pages(64);
        CHECK(getcontext(&away) == 0);
        away.uc_stack.ss_sp = own; away.uc_stack.ss_size = 64 * PAGE; away.uc_link = NULL;
        makecontext(&away, coroutine, 0);
        for (int i = 0; i < 5; i++) { swapcontext(&back, &away); press(); }
        munmap(own, 64 * PAGE);
        answer = mix(answer ^ coroutine_sum);
        /* a write barrier over pages that are not there */
        CHECK(mprotect(guarded, GUARDED_PAGES * PAGE, PROT_READ) == 0);
        press();
        barrier_hits = 0;
        for (size_t i = 0; i < GUARDED_PAGES; i++) {
            must_be(guarded + i * PAGE, 900 + i + round, "behind the barrier");
            fill_page(guarded + i * PAGE, 900 + i + round + 1);
        }
        CHECK(barrier_hits == GUARDED_PAGES);
    }
    for (size_t i = 0; i < DATA_PAGES; i++) must_be(data + i * PAGE, 500 + i, "after all");
    CHECK(ticks >= rounds);
    fprintf(stderr, "absent %zu\n", absent);
    printf("ok %lx\n", answer);
    return 0;
}

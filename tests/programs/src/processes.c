/* Every way in which a process makes, becomes, leaves or outlives another, with memory that does not fit.
   Usage: processes BALLAST_MIB CASE. Cases end with "ok"; children that outlive their parent write their
   verdict to the inherited pipe or file that the case names. */
#include "common.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
extern char **environ;

#define PAGES 4096
static char *memory;
static uint64_t base = 100000;

static void fill_all(uint64_t from) {
    base = from;
    for (size_t i = 0; i < PAGES; i++) fill_page(memory + i * PAGE, base + i);
}
static void verify_all(const char *who) {
    for (size_t i = 0; i < PAGES; i++) must_be(memory + i * PAGE, base + i, who);
}
static void verify_some(const char *who, uint64_t seed, int n) {
    for (int i = 0; i < n; i++) {
        size_t p = next_random(&seed) % PAGES;
        must_be(memory + p * PAGE, base + p, who);
    }
}
static void done(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) != child) CHECK(errno == EINTR);
    if (status != 0) FAIL("a child ended with %#x", status);
}
static pid_t bare_clone(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL); }
/* What a child does that has its own copy: it reads, writes, reads again. */
static void child_work(const char *who) {
    press();
    verify_all(who);
    fill_all(base + 1000000);
    press();
    verify_all(who);
}

static void fork_isolation(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { child_work("child"); _exit(0); }
    verify_some("parent while its child runs", 1, 2000);
    fill_all(base + 2000000);
    press();
    verify_all("parent after its writes");
    done(child);
    verify_all("parent after its child");
}
static void fork_chain(void) {
    for (int depth = 0; depth < 4; depth++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child) {
            verify_some("link of the chain", depth, 500);
            done(child);
            verify_all("link of the chain, after");
            if (depth) _exit(0);
            return;
        }
        verify_some("end of the chain", depth + 100, 500);
        for (size_t i = 0; i < PAGES; i += 7) must_be(memory + i * PAGE, base + i, "chain");
        fill_all(base + 10000);
        press();
    }
    verify_all("last of the chain");
    _exit(0);
}
static void many_children(void) {
    pid_t children[24];
    for (int i = 0; i < 24; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            verify_some("one of many", i, 300);
            for (size_t p = i; p < PAGES; p += 24) fill_page(memory + p * PAGE, 5 + i);
            for (size_t p = i; p < PAGES; p += 24)
                must_be(memory + p * PAGE, 5 + i, "own page of one of many");
            _exit(0);
        }
        fill_page(memory + (i * 31 % PAGES) * PAGE, base + i * 31 % PAGES);
    }
    for (int i = 0; i < 24; i++) done(children[i]);
    verify_all("parent of many");
}
static void quick_children(void) {
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(0);
        done(child);
    }
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(9);
        }
        done(child);
    }
    verify_all("parent of short lives");
}
static void bare(void) {
    pid_t child = bare_clone();
    CHECK(child >= 0);
    if (child == 0) { child_work("child of a bare clone"); syscall(SYS_exit_group, 0); }
    fill_all(base + 3000000);
    press();
    done(child);
    verify_all("parent of a bare clone");
}
static void bare_grandchild(void) {
    pid_t child = bare_clone();
    CHECK(child >= 0);
    if (child == 0) {
        pid_t grandchild = bare_clone();
        if (grandchild == 0) { child_work("grandchild of bare clones"); syscall(SYS_exit_group, 0); }
        verify_some("child of a bare clone", 5, 500);
        int status;
        if (wait4(grandchild, &status, 0, NULL) != grandchild || status) syscall(SYS_exit_group, 4);
        verify_all("child of a bare clone after its own child");
        syscall(SYS_exit_group, 0);
    }
    done(child);
    verify_all("grandparent");
}
/* The verdict of a process whose parent is gone comes through a pipe. */
static void await_verdict(int fd, pid_t child) {
    char text[200] = "";
    size_t n = 0;
    ssize_t r;
    while ((r = read(fd, text + n, sizeof text - 1 - n)) > 0) n += r;
    if (child) { int status; waitpid(child, &status, 0); }
    if (strcmp(text, "ok") != 0) FAIL("the orphan says `%s`", text);
}
static void orphan(pid_t (*make)(void), const char *who) {
    int fd[2];
    CHECK(pipe(fd) == 0);
    /* The parent that ends is itself a child of ours, so that a process is left to judge. */
    pid_t middle = fork();
    CHECK(middle >= 0);
    if (middle == 0) {
        close(fd[0]);
        verify_some("middle", 9, 200);
        press();
        pid_t child = make();
        if (child == 0) { child_work(who); CHECK(write(fd[1], "ok", 2) == 2); syscall(SYS_exit_group, 0); }
        syscall(SYS_exit_group, 0); /* at once */
    }
    close(fd[1]);
    await_verdict(fd[0], middle);
    verify_all("grandparent of an orphan");
}
/* A process is killed while it makes children. Each child has its memory, or ends: it never reads anything
   else. */
static void killed_parent(pid_t (*make)(void), int rounds) {
    struct { volatile int made, right, wrong; } *seen = map_shared(PAGE);
    uint64_t seed = (uint64_t)getpid();
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
    for (int round = 0; round < rounds; round++) {
        int fd[2];
        CHECK(pipe(fd) == 0);
        pid_t parent = fork();
        CHECK(parent >= 0);
        if (parent == 0) {
            close(fd[0]);
            press();
            CHECK(write(fd[1], "!", 1) == 1);
            for (;;) {
                pid_t child = make();
                CHECK(child >= 0);
                if (child == 0) {
                    uint64_t pages = (uint64_t)round;
                    for (int i = 0; i < 300; i++) {
                        size_t p = next_random(&pages) % PAGES;
                        if (check_page(memory + p * PAGE, base + p) != WORDS) {
                            __sync_fetch_and_add(&seen->wrong, 1);
                            syscall(SYS_exit_group, 3);
                        }
                    }
                    __sync_fetch_and_add(&seen->right, 1);
                    syscall(SYS_exit_group, 0);
                }
                __sync_fetch_and_add(&seen->made, 1);
                waitpid(child, NULL, 0);
            }
        }
        close(fd[1]);
        char byte;
        CHECK(read(fd[0], &byte, 1) == 1);
        if (round == 0) for (int i = 0; i < 3000 && !seen->right; i++) usleep(10000);
        usleep(next_random(&seed) % 30000);
        CHECK(kill(parent, SIGKILL) == 0);
        int status;
        /* The parent, and the child that it leaves to us. */
        while (waitpid(-1, &status, __WALL) > 0)
            if (status != 0 && WTERMSIG(status) != SIGKILL && WTERMSIG(status) != SIGBUS &&
                !(WIFEXITED(status) && WEXITSTATUS(status) == 74))
                FAIL("round %d: a process ended with %#x", round, status);
        CHECK(errno == ECHILD);
        if (seen->wrong) FAIL("round %d: %d children read what was never written", round, seen->wrong);
        close(fd[0]);
    }
    CHECK(seen->right > 0);
    fprintf(stderr, "%d children in %d rounds, %d had time to read everything\n", seen->made, rounds,
            seen->right);
    verify_all("grandparent of the children of killed parents");
}
static void daemonise(void) {
    int fd[2];
    CHECK(pipe(fd) == 0);
    pid_t first = fork();
    CHECK(first >= 0);
    if (first == 0) {
        close(fd[0]);
        setsid();
        pid_t second = fork();
        if (second) _exit(0);
        CHECK(chdir("/") == 0);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 0); dup2(null, 1);
        child_work("daemon");
        CHECK(write(fd[1], "ok", 2) == 2);
        _exit(0);
    }
    close(fd[1]);
    await_verdict(fd[0], first);
    verify_all("who started the daemon");
}
static void libc_daemon(void) {
    /* daemon(3): the first process of the run ends, the daemon goes on alone. */
    printf("daemon starts\n"); fflush(stdout);
    CHECK(daemon(1, 1) == 0);
    child_work("daemon(3)");
}
static void vforks(void) {
    for (int i = 0; i < 20; i++) {
        pid_t child = vfork();
        if (child == 0) { execl("/bin/true", "true", NULL); _exit(9); }
        done(child);
        verify_some("around a vfork", i, 100);
        pid_t spawned;
        char *argv[] = {"sh", "-c", "exit 0", NULL};
        CHECK(posix_spawn(&spawned, "/bin/sh", NULL, NULL, argv, environ) == 0);
        done(spawned);
        CHECK(system("exit 0") == 0);
        FILE *p = popen("echo hello", "r");
        char line[64];
        CHECK(p && fgets(line, sizeof line, p) && strcmp(line, "hello\n") == 0 && pclose(p) == 0);
    }
    verify_all("after all spawning");
}
static volatile int stop;
static void *toucher(void *arg) {
    uint64_t seed = (uintptr_t)arg;
    while (!stop) {
        size_t p = next_random(&seed) % PAGES;
        must_be(memory + p * PAGE, base + p, "a thread during forks");
    }
    return NULL;
}
static void *presser(void *arg) { (void)arg; while (!stop) press(); return NULL; }
static void fork_threads(void) {
    pthread_t t[3];
    CHECK(pthread_create(&t[0], NULL, toucher, (void *)1) == 0);
    CHECK(pthread_create(&t[1], NULL, toucher, (void *)2) == 0);
    CHECK(pthread_create(&t[2], NULL, presser, NULL) == 0);
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            verify_some("child of a threaded program", i, 400);
            for (size_t p = 0; p < PAGES; p += 3) fill_page(memory + p * PAGE, 77);
            for (size_t p = 0; p < PAGES; p += 3) must_be(memory + p * PAGE, 77, "own writes");
            char *m = malloc(1 << 22);
            memset(m, 5, 1 << 22);
            free(m);
            _exit(0);
        }
        done(child);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
    verify_all("after forks among threads");
}
static void exec_self(char **argv, int generations) {
    char n[16];
    snprintf(n, sizeof n, "%d", generations);
    if (generations > 0) {
        char *args[] = {argv[0], argv[1], "exec-self", n, NULL};
        execv("/proc/self/exe", args);
        FAIL("exec");
    }
}
static void close_everything(void) {
    for (int i = 3; i < 1024; i++) close(i);
    if (close_range(3, ~0U, 0) != 0) CHECK(errno == ENOSYS);
    press(); verify_all("after closing every descriptor");
    close(0);
    int fd = open("/dev/null", O_RDWR);
    CHECK(fd == 0);
    /* Descriptors that the program opens afterwards are its own. */
    for (int i = 0; i < 64; i++) { int f = open("/dev/null", O_RDWR); CHECK(f == 3 + i); }
    for (int i = 0; i < 64; i++) CHECK(close(3 + i) == 0);
    fill_all(base + 5000000); press(); verify_all("after closing and writing");
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { close_range(3, ~0U, 0); child_work("child that closed everything"); _exit(0); }
    done(child);
}
static void close_all_early(void) { close_range(3, ~0U, 0); }
static void closes_output(void) {
    /* A reader of our output must see its end when we close it, although we go on. */
    int fd[2];
    CHECK(pipe(fd) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(fd[0]);
        char *m = map_pages(PAGES);
        for (size_t i = 0; i < PAGES; i++) fill_page(m + i * PAGE, i + 1);
        press();
        close(fd[1]);
        for (;;) pause();
    }
    close(fd[1]);
    char c;
    CHECK(read(fd[0], &c, 1) == 0);
    kill(child, SIGKILL);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
}
static void few_descriptors(void) {
    struct rlimit few = {8, 8};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    int n = 0;
    while (open("/dev/null", O_RDONLY) >= 0) n++;
    CHECK(n == 5);
    press(); verify_all("with no descriptor left");
    close(7); close(6); close(5);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { child_work("child with few descriptors"); _exit(0); }
    done(child);
}
static void no_rights(void) {
    if (geteuid() != 0) { return; }
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    CHECK(getuid() == 65534);
}
static void *after_main(void *arg) {
    usleep(20000);
    (void)arg;
    press(); verify_all("after main has ended");
    char *more = map_pages(PAGES * 2);
    for (size_t i = 0; i < PAGES * 2; i++) fill_page(more + i * PAGE, i + 1);
    press();
    for (size_t i = 0; i < PAGES * 2; i++) must_be(more + i * PAGE, i + 1, "grown after main has ended");
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { child_work("child of a thread after main"); _exit(0); }
    done(child);
    printf("ok\n");
    fflush(stdout);
    _exit(0);
}
/* No thread calls exit: the last one that ends is the program's end, as exit(0) would be. */
static void *last_thread(void *arg) {
    usleep(20000);
    press(); verify_all("the last thread");
    return arg;
}
/* Nothing of the C library runs then. */
static void *bare_end(void *arg) {
    last_thread(arg);
    printf("ok\n");
    fflush(stdout);
    return (void *)syscall(SYS_exit, 42);
}
static void at_the_end(void) {
    press(); verify_all("a handler of the program's end");
    printf("ok\n");
}
static void another_root(void) {
    /* Without /proc. Only root may: others stay where they are. */
    char *root = mkdtemp((char[]){"/tmp/rampool-root-XXXXXX"});
    /* Nothing of it stays behind. */
    CHECK(root && chdir(root) == 0 && rmdir(root) == 0 && (chroot(".") == 0 || errno == EPERM));
    CHECK(geteuid() != 0 || access("/proc", F_OK) != 0);
    press(); verify_all("in another root directory");
    char *more = map_pages(PAGES * 2);
    for (size_t i = 0; i < PAGES * 2; i++) fill_page(more + i * PAGE, i + 1);
    press();
    for (size_t i = 0; i < PAGES * 2; i++)
        must_be(more + i * PAGE, i + 1, "mapped in another root directory");
}
static void locked_memory(void) {
    CHECK(mlock(memory, 64 * PAGE) == 0 || errno == ENOMEM || errno == EPERM);
    press(); verify_all("partly locked");
    CHECK(munlock(memory, 64 * PAGE) == 0);
    press(); verify_all("unlocked");
}
/* The kernel locks, and fills, what the agent has mapped as well. */
static void all_locked(void) {
    for (int round = 0; round < 4; round++) {
        if (mlockall(MCL_CURRENT | (round & 1 ? MCL_ONFAULT : 0) | (round & 2 ? MCL_FUTURE : 0)) != 0) {
            CHECK(errno == ENOMEM || errno == EPERM);
            return;
        }
        verify_all("locked");
        char *more = map_pages(PAGES * 2);
        for (size_t i = 0; i < PAGES * 2; i++) fill_page(more + i * PAGE, i + 1);
        if (!(round & 2)) {
            /* It came after, and is not locked. */
            for (int i = 0; i < 2000 && getenv("LD_PRELOAD") && absent_pages(more, PAGES * 2) == 0; i++)
                usleep(5000);
            CHECK(!getenv("LD_PRELOAD") || absent_pages(more, PAGES * 2) > 0);
        }
        CHECK(munlockall() == 0);
        press(); verify_all("unlocked");
        for (size_t i = 0; i < PAGES * 2; i++) must_be(more + i * PAGE, i + 1, "mapped while all was locked");
        munmap(more, PAGES * 2 * PAGE);
    }
}
static void forks_without_rights(void) {
    no_rights();
    press(); verify_all("without rights");
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) { child_work("child without rights"); _exit(0); }
        done(child);
    }
    press(); verify_all("without rights, after forks");
}
static void forks_without_files(void) {
    struct rlimit none = {0, 0};
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { child_work("child that may write no file"); _exit(0); }
    done(child);
    press(); verify_all("after it may write no file");
    /* The harness reads what is said from a file. */
    _exit(0);
}
static void no_fork_memory(void) {
    char *gone = map_pages(512), *wiped = map_pages(512);
    for (size_t i = 0; i < 512; i++) {
        fill_page(gone + i * PAGE, 1 + i);
        fill_page(wiped + i * PAGE, 1 + i);
    }
    press();
    CHECK(madvise(gone, 512 * PAGE, MADV_DONTFORK) == 0);
    CHECK(madvise(wiped, 512 * PAGE, MADV_WIPEONFORK) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (size_t i = 0; i < 512; i++) must_be(wiped + i * PAGE, 0, "MADV_WIPEONFORK in the child");
        unsigned char vec;
        CHECK(mincore(gone, PAGE, &vec) == -1 && errno == ENOMEM);
        char *other =
            mmap(gone, 512 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(other == gone);
        for (size_t i = 0; i < 512; i++) must_be(gone + i * PAGE, 0, "memory in the place of MADV_DONTFORK");
        child_work("child without some of the memory");
        for (size_t i = 0; i < 512; i++)
            must_be(gone + i * PAGE, 0, "memory in the place of MADV_DONTFORK, later");
        _exit(0);
    }
    done(child);
    for (size_t i = 0; i < 512; i++) {
        must_be(gone + i * PAGE, 1 + i, "MADV_DONTFORK in the parent");
        must_be(wiped + i * PAGE, 1 + i, "MADV_WIPEONFORK in the parent");
    }
}

/* As many mappings as the kernel allows (vm.max_map_count), less `spare`: pages by turns closed and readable,
   none of them touched. */
static void many_mappings(int spare) {
    size_t most = 1 << 20;
    char *area = mmap(NULL, 2 * most * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(area != MAP_FAILED);
    size_t made = 0;
    while (made < most && mprotect(area + 2 * made * PAGE, PAGE, PROT_READ) == 0) made++;
    CHECK(made == most || errno == ENOMEM);
    /* Each of them has divided the area twice. */
    for (int i = 0; i < (spare + 1) / 2 && made > 0; i++)
        CHECK(mprotect(area + 2 * --made * PAGE, PAGE, PROT_NONE) == 0);
    fprintf(stderr, "%zu mappings made\n", 2 * made);
}
/* Touches fresh memory as fast as it can: one large mapping in huge pages, then many small ones. */
static void grow(void) {
    char *big = mmap(NULL, 256 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(big != MAP_FAILED);
    madvise(big, 256 * MIB, MADV_HUGEPAGE);
    memset(big, 7, 256 * MIB);
    enum { PARTS = 256 };
    char *part[PARTS];
    for (int i = 0; i < PARTS; i++) { part[i] = map_pages(MIB / PAGE); memset(part[i], i, MIB); }
    for (int i = 0; i < PARTS; i++) for (size_t k = 0; k < MIB; k += 509) CHECK(part[i][k] == (char)i);
    for (size_t k = 0; k < 256 * MIB; k += 509) CHECK(big[k] == 7);
}

/* As sandboxes count the threads of their process: each is a directory. */
static int threads_seen(void) {
    struct stat task;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY);
    CHECK(proc >= 0 && fstatat(proc, "self/task/", &task, 0) == 0);
    close(proc);
    return (int)task.st_nlink - 2;
}
static void *waits(void *lock) {
    CHECK(pthread_mutex_lock(lock) == 0);
    CHECK(pthread_mutex_unlock(lock) == 0);
    return NULL;
}
/* Needs no rights and changes nothing, and only a process of one thread may. */
static void alone(void) {
    CHECK(threads_seen() == 1);
    for (int i = 0; i < 20; i++) CHECK(unshare(CLONE_THREAD) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { CHECK(threads_seen() == 1 && unshare(CLONE_THREAD) == 0); _exit(0); }
    done(child);
    pthread_t thread;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    CHECK(pthread_mutex_lock(&lock) == 0 && pthread_create(&thread, NULL, waits, &lock) == 0);
    CHECK(threads_seen() == 2 && unshare(CLONE_THREAD) == -1 && errno == EINVAL);
    CHECK(pthread_mutex_unlock(&lock) == 0 && pthread_join(thread, NULL) == 0);
    /* The thread may be there for a moment longer than it can be waited for. */
    while (threads_seen() != 1) sched_yield();
    CHECK(unshare(CLONE_THREAD) == 0);
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    const char *c = argv[2];
    int left = argc > 3 ? atoi(argv[3]) : 3;
    /* Before any memory is needed. */
    if (!strcmp(c, "close-all-early")) close_all_early();
    if (!strcmp(c, "alone")) alone();
    if (!strcmp(c, "no-rights")) no_rights();
    if (!strcmp(c, "not-dumpable")) prctl(PR_SET_DUMPABLE, 0);
    if (!strcmp(c, "many-mappings-first")) many_mappings(48);
    memory = map_pages(PAGES);
    fill_all(100000);
    ballast(strtoul(argv[1], NULL, 0) * MIB);
    /* Under rampool it never fits, but it can be quicker than the way to the pool: nothing is shown before
       pages have left. */
    for (int i = 0; i < 2000 && getenv("LD_PRELOAD") && absent_pages(memory, PAGES) == 0; i++) {
        press();
        usleep(5000);
    }
    fprintf(stderr, "absent %zu\n", absent_pages(memory, PAGES));
    verify_all("at the start");
    press();
    if (!strcmp(c, "fork-isolation")) fork_isolation();
    else if (!strcmp(c, "alone")) { CHECK(threads_seen() == 1); fork_isolation(); }
    else if (!strcmp(c, "fork-chain")) fork_chain();
    else if (!strcmp(c, "many-children")) many_children();
    else if (!strcmp(c, "quick-children")) quick_children();
    else if (!strcmp(c, "bare-clone")) bare();
    else if (!strcmp(c, "bare-grandchild")) bare_grandchild();
    else if (!strcmp(c, "orphan")) orphan(fork, "orphan");
    else if (!strcmp(c, "bare-orphan")) orphan(bare_clone, "orphan of a bare clone");
    else if (!strcmp(c, "killed-parent")) killed_parent(fork, argc > 3 ? atoi(argv[3]) : 12);
    else if (!strcmp(c, "killed-bare-parent")) killed_parent(bare_clone, argc > 3 ? atoi(argv[3]) : 12);
    else if (!strcmp(c, "double-fork")) daemonise();
    else if (!strcmp(c, "daemon")) libc_daemon();
    else if (!strcmp(c, "spawning")) vforks();
    else if (!strcmp(c, "fork-threads")) fork_threads();
    else if (!strcmp(c, "exec-self")) exec_self(argv, left - 1);
    else if (!strcmp(c, "close-everything")) close_everything();
    else if (!strcmp(c, "close-all-early") || !strcmp(c, "no-rights") || !strcmp(c, "not-dumpable")) {
        fork_isolation();
    } else if (!strcmp(c, "closes-output"))
        closes_output();
    else if (!strcmp(c, "few-descriptors")) few_descriptors();
    else if (!strcmp(c, "many-mappings")) {
        many_mappings(0);
        press();
        verify_all("with as many mappings as there can be");
        fill_all(base + 4000000);
        press();
        verify_all("the same, written");
    } else if (!strcmp(c, "many-mappings-first")) {
        fill_all(base + 4000000);
        press();
        verify_all("after mappings were many");
    } else if (!strcmp(c, "locked-memory"))
        locked_memory();
    else if (!strcmp(c, "all-locked")) all_locked();
    else if (!strcmp(c, "forks-without-files")) forks_without_files();
    else if (!strcmp(c, "forks-without-rights")) forks_without_rights();
    else if (!strcmp(c, "no-fork-memory")) no_fork_memory();
    else if (!strcmp(c, "main-ends")) {
        pthread_t t;
        pthread_create(&t, NULL, after_main, NULL);
        pthread_exit(NULL);
    } else if (!strcmp(c, "last-thread-ends")) {
        pthread_t t;
        CHECK(atexit(at_the_end) == 0);
        CHECK(pthread_create(&t, NULL, last_thread, NULL) == 0);
        pthread_detach(t);
        pthread_exit(NULL);
    } else if (!strcmp(c, "last-thread-is-gone")) {
        pthread_t t;
        CHECK(pthread_create(&t, NULL, bare_end, NULL) == 0);
        syscall(SYS_exit, 42);
    } else if (!strcmp(c, "another-root"))
        another_root();
    else if (!strcmp(c, "grow")) grow();
    else if (!strcmp(c, "crash")) { *(volatile int *)8 = 1; }
    else if (!strcmp(c, "abort")) abort();
    else if (!strcmp(c, "exit-42")) exit(42);
    else if (!strcmp(c, "steady")) {
        printf("steady\n");
        fflush(stdout);
        for (;;) {
            press();
            verify_some("steady", 3, 500);
        }
    } else
        FAIL("no such case: %s", c);
    printf("ok\n");
    return 0;
}

/* System calls that read and write memory which is not resident: every kind of pointer argument a program can
   hand to the kernel.
   Usage: syscalls BALLAST_MIB DIRECTORY [wrapped]. With `wrapped` only calls through the C library whose
   arguments are no pointers to pointers. Says how many pages were absent when the calls were made. */
#include "common.h"
#include <dirent.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/xattr.h>
#include <sys/wait.h>
#include <time.h>

#define PAGES 256
static char *buffer; /* PAGES pages; what the calls read and write */
static char *small;  /* 64 pages; one structure each */
static size_t absent_total, cases;
static char directory[512];

static void pushed_out(void) {
    press();
    absent_total += absent_pages(buffer, PAGES) + absent_pages(small, 64);
    cases++;
}
static void fill(uint64_t tag) { for (size_t i = 0; i < PAGES; i++) fill_page(buffer + i * PAGE, tag + i); }
static void expect(uint64_t tag, const char *what) {
    for (size_t i = 0; i < PAGES; i++) must_be(buffer + i * PAGE, tag + i, what);
}
static void *slot(int i) { return small + i * PAGE; }
static const char *path_of(const char *name) {
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void files(void) {
    int fd = open(path_of("file"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    fill(1000); pushed_out();
    CHECK(pwrite(fd, buffer, PAGES * PAGE, 0) == PAGES * PAGE);
    fill(2000); pushed_out();
    CHECK(pread(fd, buffer, PAGES * PAGE, 0) == PAGES * PAGE);
    expect(1000, "read(2) into absent pages");
    /* Fresh memory, never touched by anybody but the kernel. */
    char *fresh = map_pages(PAGES);
    CHECK(pread(fd, fresh, PAGES * PAGE, 0) == PAGES * PAGE);
    for (size_t i = 0; i < PAGES; i++) must_be(fresh + i * PAGE, 1000 + i, "read(2) into fresh pages");
    munmap(fresh, PAGES * PAGE);
    /* Not aligned to anything, across page borders, by many vectors that themselves are absent. */
    struct iovec *v = slot(0);
    for (int i = 0; i < 200; i++) v[i] = (struct iovec){buffer + i * 5000 + 13, 4099};
    fill(3000); pushed_out();
    CHECK(pwritev(fd, v, 200, 0) == 200 * 4099);
    char *copy = malloc(200 * 4099);
    CHECK(pread(fd, copy, 200 * 4099, 0) == 200 * 4099);
    for (int i = 0; i < 200; i++) CHECK(memcmp(copy + i * 4099, buffer + i * 5000 + 13, 4099) == 0);
    fill(4000); pushed_out();
    CHECK(preadv(fd, v, 200, 0) == 200 * 4099);
    for (int i = 0; i < 200; i++) CHECK(memcmp(copy + i * 4099, buffer + i * 5000 + 13, 4099) == 0);
    free(copy);
    /* More than can be resident at a time, in one call. */
    struct iovec *many = slot(44);
    size_t each = ballast_pages / 1024 * PAGE;
    for (int i = 0; i < 1024; i++) many[i] = (struct iovec){ballast_memory + i * each, each};
    pushed_out();
    CHECK(pwritev(fd, many, 1024, 0) == (ssize_t)(1024 * each));
    char *other = map_pages(1024 * each / PAGE);
    for (int i = 0; i < 1024; i++) many[i].iov_base = other + i * each;
    pushed_out();
    CHECK(preadv(fd, many, 1024, 0) == (ssize_t)(1024 * each));
    for (size_t i = 0; i < 1024 * each / PAGE; i++)
        must_be(other + i * PAGE, 7000000 + i, "preadv of more than fits");
    munmap(other, 1024 * each);
    close(fd);
}

static void direct_and_async(void) {
    int fd = open(path_of("direct"), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0) { printf("O_DIRECT: not offered by this file system\n"); return; }
    fill(5000); pushed_out();
    CHECK(pwrite(fd, buffer, PAGES * PAGE, 0) == PAGES * PAGE);
    fill(6000); pushed_out();
    CHECK(pread(fd, buffer, PAGES * PAGE, 0) == PAGES * PAGE);
    expect(5000, "direct read");
    /* The device writes into pinned pages while everything else is pushed out. */
    aio_context_t context = 0;
    if (syscall(SYS_io_setup, 64, &context) == 0) {
        struct iocb *blocks = slot(1), **list = slot(2);
        struct io_event *events = slot(3);
        for (int round = 0; round < 8; round++) {
            fill(7000);
            for (int i = 0; i < 32; i++) {
                memset(&blocks[i], 0, sizeof blocks[i]);
                blocks[i].aio_lio_opcode = IOCB_CMD_PREAD; blocks[i].aio_fildes = fd;
                blocks[i].aio_buf = (uintptr_t)(buffer + i * 8 * PAGE);
                blocks[i].aio_nbytes = 8 * PAGE;
                blocks[i].aio_offset = i * 8 * PAGE;
                list[i] = &blocks[i];
            }
            pushed_out();
            CHECK(syscall(SYS_io_submit, context, 32, list) == 32);
            press();
            CHECK(syscall(SYS_io_getevents, context, 32, 32, events, NULL) == 32);
            for (int i = 0; i < 32; i++) CHECK(events[i].res == (long)(8 * PAGE));
            expect(5000, "asynchronous direct read");
        }
        syscall(SYS_io_destroy, context);
    }
    close(fd);
}

struct pump { int fd; char *from; size_t bytes; };
static void *pump(void *arg) {
    struct pump *p = arg;
    for (size_t done = 0; done < p->bytes;) {
        ssize_t n = write(p->fd, p->from + done, p->bytes - done);
        if (n <= 0) FAIL("write to a pipe or socket");
        done += n;
    }
    return NULL;
}
static void through(int from, int to, const char *what) {
    char *source = map_pages(PAGES);
    for (size_t i = 0; i < PAGES; i++) fill_page(source + i * PAGE, 8000 + i);
    fill(9000); pushed_out();
    absent_total += absent_pages(source, PAGES);
    struct pump p = {to, source, PAGES * PAGE};
    pthread_t t;
    CHECK(pthread_create(&t, NULL, pump, &p) == 0);
    for (size_t done = 0; done < PAGES * PAGE;) {
        ssize_t n = read(from, buffer + done, PAGES * PAGE - done);
        CHECK(n > 0);
        done += n;
    }
    pthread_join(t, NULL);
    expect(8000, what);
    munmap(source, PAGES * PAGE);
    close(from); close(to);
}
static void streams(void) {
    int fd[2];
    CHECK(pipe(fd) == 0); through(fd[0], fd[1], "pipe");
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0); through(fd[0], fd[1], "socket");
    /* Datagrams with ancillary data, all of it absent. */
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, fd) == 0);
    struct msghdr *message = slot(4);
    struct iovec *v = slot(5);
    struct cmsghdr *control = slot(6);
    memset(message, 0, sizeof *message);
    *v = (struct iovec){buffer, 8 * PAGE};
    message->msg_iov = v;
    message->msg_iovlen = 1;
    message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(sizeof(int));
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(control), &fd[0], sizeof(int));
    fill(10000); pushed_out();
    CHECK(sendmsg(fd[0], message, 0) == 8 * PAGE);
    fill(11000); pushed_out();
    CHECK(recvmsg(fd[1], message, 0) == 8 * PAGE);
    for (size_t i = 0; i < 8; i++) must_be(buffer + i * PAGE, 10000 + i, "recvmsg");
    int passed;
    memcpy(&passed, CMSG_DATA(control), sizeof passed);
    struct stat a, b;
    CHECK(fstat(passed, &a) == 0 && fstat(fd[0], &b) == 0 && a.st_ino == b.st_ino);
    close(passed); close(fd[0]); close(fd[1]);
    /* Pages lent to a pipe, and pages of ours read by the kernel on another's behalf. */
    CHECK(pipe(fd) == 0);
    fill(12000); pushed_out();
    struct iovec piece = {buffer, 8 * PAGE};
    CHECK(vmsplice(fd[1], &piece, 1, 0) == 8 * PAGE);
    press();
    char *back = map_pages(8);
    CHECK(read(fd[0], back, 8 * PAGE) == 8 * PAGE);
    for (size_t i = 0; i < 8; i++) must_be(back + i * PAGE, 12000 + i, "vmsplice");
    close(fd[0]); close(fd[1]);
    pushed_out();
    struct iovec to = {back, 8 * PAGE}, from = {buffer + 100 * PAGE, 8 * PAGE};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 8 * PAGE)
        for (size_t i = 0; i < 8; i++) must_be(back + i * PAGE, 12100 + i, "process_vm_readv");
    for (size_t i = 0; i < 8; i++) fill_page(back + i * PAGE, 12200 + i);
    pushed_out();
    if (process_vm_writev(getpid(), &to, 1, &from, 1, 0) == 8 * PAGE)
        for (size_t i = 0; i < 8; i++) must_be(buffer + (100 + i) * PAGE, 12200 + i, "process_vm_writev");
    munmap(back, 8 * PAGE);
}

static void structures(void) {
    strcpy(slot(10), path_of("file"));
    pushed_out();
    CHECK(stat(slot(10), slot(11)) == 0 && ((struct stat *)slot(11))->st_size > 0);
    pushed_out();
    int fd = open(slot(10), O_RDONLY);
    CHECK(fd >= 0);
    CHECK(flistxattr(fd, slot(12), PAGE) >= 0 || errno == ENOTSUP);
    pushed_out();
    CHECK(ioctl(fd, FIONREAD, slot(13)) == 0 && *(int *)slot(13) > 0);
    close(fd);
    pushed_out(); CHECK(getcwd(slot(14), PAGE) == slot(14));
    pushed_out(); CHECK(readlink("/proc/self/exe", slot(15), PAGE) > 0);
    pushed_out(); CHECK(uname(slot(16)) == 0 && strcmp(((struct utsname *)slot(16))->sysname, "Linux") == 0);
    pushed_out(); CHECK(getrusage(RUSAGE_SELF, slot(17)) == 0 && ((struct rusage *)slot(17))->ru_maxrss > 0);
    pushed_out();
    CHECK(clock_gettime(CLOCK_MONOTONIC, slot(18)) == 0 && ((struct timespec *)slot(18))->tv_sec > 0);
    pushed_out();
    CHECK(syscall(SYS_clock_gettime, CLOCK_REALTIME, slot(19)) == 0 &&
          ((struct timespec *)slot(19))->tv_sec > 0);
    pushed_out(); CHECK(syscall(SYS_getrandom, slot(20), PAGE, 0) == (long)PAGE);
    *(struct timespec *)slot(21) = (struct timespec){0, 1000};
    pushed_out(); CHECK(nanosleep(slot(21), slot(22)) == 0);
    pushed_out(); CHECK(getrlimit(RLIMIT_NOFILE, slot(23)) == 0 && ((struct rlimit *)slot(23))->rlim_cur > 0);
    pushed_out();
    CHECK(sched_getaffinity(0, sizeof(cpu_set_t), slot(24)) == 0 && CPU_COUNT((cpu_set_t *)slot(24)) > 0);
    pushed_out();
    CHECK(sigaction(SIGUSR1, NULL, slot(25)) == 0 && ((struct sigaction *)slot(25))->sa_handler == SIG_DFL);
    pushed_out(); CHECK(sigprocmask(SIG_BLOCK, NULL, slot(26)) == 0 && sigismember(slot(26), SIGINT) == 0);
    DIR *dir = opendir(directory);
    CHECK(dir);
    pushed_out(); CHECK(syscall(SYS_getdents64, dirfd(dir), slot(27), PAGE) > 0);
    closedir(dir);
    int pair[2];
    CHECK(pipe(pair) == 0 && write(pair[1], "x", 1) == 1);
    struct pollfd *polled = slot(28);
    for (int i = 0; i < 500; i++) polled[i] = (struct pollfd){pair[0], POLLIN, 0};
    pushed_out();
    CHECK(poll(polled, 500, 10000) == 500 && polled[499].revents == POLLIN);
    FD_ZERO((fd_set *)slot(29)); FD_SET(pair[0], (fd_set *)slot(29));
    *(struct timeval *)slot(30) = (struct timeval){10, 0};
    pushed_out();
    CHECK(select(pair[0] + 1, slot(29), NULL, NULL, slot(30)) == 1);
    int poller = epoll_create1(0);
    *(struct epoll_event *)slot(31) = (struct epoll_event){.events = EPOLLIN, .data.u64 = 42};
    pushed_out();
    CHECK(epoll_ctl(poller, EPOLL_CTL_ADD, pair[0], slot(31)) == 0);
    CHECK(epoll_wait(poller, slot(32), 16, 10000) == 1 && ((struct epoll_event *)slot(32))->data.u64 == 42);
    close(poller); close(pair[0]); close(pair[1]);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    *(socklen_t *)slot(33) = PAGE;
    pushed_out();
    CHECK(getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, slot(34), slot(33)) == 0 && *(int *)slot(34) > 0);
    *(socklen_t *)slot(33) = PAGE;
    pushed_out();
    CHECK(getsockname(pair[0], slot(35), slot(33)) == 0 &&
          ((struct sockaddr *)slot(35))->sa_family == AF_UNIX);
    close(pair[0]); close(pair[1]);
    /* A child whose arguments, environment and status lie in absent pages. */
    char **argv = slot(36), **envp = slot(38);
    strcpy(slot(37), "/bin/sh");
    strcpy((char *)slot(37) + 100, "-c");
    strcpy((char *)slot(37) + 200, "exit $CODE");
    strcpy(slot(39), "CODE=17");
    argv[0] = slot(37);
    argv[1] = (char *)slot(37) + 100;
    argv[2] = (char *)slot(37) + 200;
    argv[3] = NULL;
    envp[0] = slot(39);
    envp[1] = NULL;
    pushed_out();
    pid_t child = vfork();
    if (child == 0) { execve(argv[0], argv, envp); _exit(99); }
    pushed_out();
    CHECK(wait4(child, slot(40), 0, slot(41)) == child);
    CHECK(WIFEXITED(*(int *)slot(40)) && WEXITSTATUS(*(int *)slot(40)) == 17);
}

/* Futexes, and the word that the kernel clears when a thread ends, in absent pages. */
static void *sleeper(void *arg) {
    uint32_t *word = arg;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 5)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 5, NULL, NULL, 0);
    return (void *)(uintptr_t)*word;
}
static void futexes(void) {
    for (int round = 0; round < 20; round++) {
        uint32_t *word = (uint32_t *)slot(42) + round;
        *word = 5;
        pthread_t t;
        CHECK(pthread_create(&t, NULL, sleeper, word) == 0);
        pushed_out();
        __atomic_store_n(word, 6, __ATOMIC_RELEASE);
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        void *result;
        CHECK(pthread_join(t, &result) == 0 && result == (void *)6);
    }
    pthread_mutex_t *lock = slot(43);
    pthread_cond_t *condition = (void *)((char *)slot(43) + 512);
    pthread_mutex_init(lock, NULL); pthread_cond_init(condition, NULL);
    pushed_out();
    pthread_mutex_lock(lock);
    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec = (soon.tv_nsec + 1000000) % 1000000000;
    CHECK(pthread_cond_timedwait(condition, lock, &soon) == ETIMEDOUT);
    pthread_mutex_unlock(lock);
}

int main(int argc, char **argv) {
    CHECK(argc == 3 || argc == 4);
    int wrapped = argc == 4;
    snprintf(directory, sizeof directory, "%s", argv[2]);
    buffer = map_pages(PAGES);
    small = map_pages(64);
    memset(small, 1, 64 * PAGE);
    ballast(strtoul(argv[1], NULL, 0) * MIB);
    files();
    if (!wrapped) direct_and_async();
    streams(); structures(); futexes();
    press();
    fprintf(stderr, "absent %zu\n", absent_total);
    printf("ok %zu calls\n", cases);
    return 0;
}

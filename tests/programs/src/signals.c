/* Says each signal that it gets, in a line of its own: its process id and the signal's number. SIGHUP ends it
   with 42.
   Usage: signals. */
#include "common.h"
#include <signal.h>

static void say(int number) {
    char line[32];
    size_t used = 0;
    int numbers[2] = {(int)getpid(), number};
    for (int which = 0; which < 2; which++) {
        char digits[12];
        int count = 0;
        for (int rest = numbers[which]; rest > 0; rest /= 10) digits[count++] = (char)('0' + rest % 10);
        while (count > 0) line[used++] = digits[--count];
        line[used++] = which == 0 ? ' ' : '\n';
    }
    /* One write, so that lines of several processes do not mix. */
    int written = write(1, line, used) == (ssize_t)used;
    /* Its terminal may be gone. */
    if (number == SIGHUP) _exit(42);
    if (!written) _exit(3);
}

int main(void) {
    static const int all[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM, SIGALRM, SIGCONT, SIGWINCH};
    struct sigaction action = {.sa_handler = say, .sa_flags = SA_RESTART};
    sigfillset(&action.sa_mask);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (sigaction(all[i], &action, NULL) != 0) return 2;
    printf("ready\n");
    fflush(stdout);
    for (;;) pause();
}

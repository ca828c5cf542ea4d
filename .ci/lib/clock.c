/* A system clock that jumps: adds the seconds in the file that CLOCK_AHEAD names. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("CLOCK_AHEAD"), O_RDONLY);
    void *page = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    ahead = page == MAP_FAILED ? 0 : page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME && ahead)
        now->tv_sec += *ahead;
    return result;
}

/* A wall clock that is wrong by as many seconds as an 8-byte file says at any moment.
 *
 * Loaded before a program's own libraries (LD_PRELOAD), with the file's path in CHAOS_CLOCK. Only what asks for
 * the time of day is led astray: monotonic clocks are left alone, as by a clock that is set.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_clock(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) open_clock(); /* another library's constructor was first */
    int failed = real(id, at);
    if (!failed && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

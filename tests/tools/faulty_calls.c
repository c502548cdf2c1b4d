/* System calls that fail or lie as they do on network drives and on computers whose clock is set: for LD_PRELOAD.

   FAULTY_RENAME=ERRNO    renaming to a path that ends in FAULTY_PATH fails
   FAULTY_DONE=1          ... after it was done, as when a network drive's answer is lost
   FAULTY_FLOCK=ERRNO     no file can be locked
   FAULTY_CLOCK=SECONDS   the time of day jumps forth and back by so much, from one call to the next */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static long setting(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

int rename(const char *from, const char *to) {
  int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
  const char *ends = getenv("FAULTY_PATH");
  long fault = setting("FAULTY_RENAME");
  size_t length = strlen(to), wanted = ends ? strlen(ends) : 0;
  if (!fault || length < wanted || strcmp(to + length - wanted, ends ? ends : ""))
    return real(from, to);
  if (setting("FAULTY_DONE")) {
    int result = real(from, to);
    if (result)
      return result;
  }
  errno = (int)fault;
  return -1;
}

int flock(int file, int operation) {
  int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
  long fault = setting("FAULTY_FLOCK");
  if (!fault)
    return real(file, operation);
  errno = (int)fault;
  return -1;
}

static long jump(void) {
  static unsigned calls;
  return setting("FAULTY_CLOCK") * ((long)(__sync_fetch_and_add(&calls, 1) % 3) - 1);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (!result && clock == CLOCK_REALTIME)
    now->tv_sec += jump();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(now, zone);
  if (!result)
    now->tv_sec += jump();
  return result;
}

time_t time(time_t *into) {
  time_t (*real)(time_t *) = dlsym(RTLD_NEXT, "time");
  time_t now = real(NULL) + jump();
  if (into)
    *into = now;
  return now;
}

// Reads and writes of files that fail or take long: a library for LD_PRELOAD, for tests/faults.py.
// It stands between a process and the C library, so that the clients in C++ meet the faults, too. A process names its
// control file with faulty_files(); another process maps the same file, and changes it at any time.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
  volatile int read_error, write_error, delay_ms;  // error numbers, 0 = none
  char folder[1012];                               // files below it
};
static struct control *control;

int faulty_files(const char *path) {
  int fd = open(path, O_RDWR | O_CLOEXEC);
  void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (found == MAP_FAILED) return -1;
  control = found;
  return 0;
}

// The error of an operation on this file; waits first.
static int fails(int fd, int is_write) {
  char link[64], path[4096];
  if (!control || !(control->read_error || control->write_error || control->delay_ms)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size <= 0) return 0;
  path[size] = 0;
  if (strncmp(path, control->folder, strlen(control->folder))) return 0;
  if (control->delay_ms) usleep(1000 * control->delay_ms);
  return is_write ? control->write_error : control->read_error;
}

#define WRAP(type, name, is_write, parameters, arguments)           \
  type name parameters {                                            \
    static type(*real) parameters;                                  \
    if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);  \
    int error = fails(fd, is_write);                                \
    if (error) { errno = error; return -1; }                        \
    return real arguments;                                          \
  }

WRAP(ssize_t, read, 0, (int fd, void *to, size_t size), (fd, to, size))
WRAP(ssize_t, pread, 0, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
WRAP(ssize_t, pread64, 0, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
WRAP(ssize_t, write, 1, (int fd, const void *from, size_t size), (fd, from, size))
WRAP(ssize_t, pwrite, 1, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
WRAP(ssize_t, pwrite64, 1, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
WRAP(ssize_t, writev, 1, (int fd, const struct iovec *from, int count), (fd, from, count))
WRAP(int, fsync, 1, (int fd), (fd))
WRAP(int, fdatasync, 1, (int fd), (fd))

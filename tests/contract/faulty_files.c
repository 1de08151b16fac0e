/* Preloaded into the processes of a test: the Nth change of a file below a folder fails, or kills its process.
 *
 * FAULTY_FOLDER: the folder. FAULTY_STEPS: a file of 8 bytes, the number of changes so far, of all processes.
 * FAULTY_AT: the change that fails, from 1; 0 only counts. FAULTY_ERROR: an errno, or 0: SIGKILL before the change.
 * FAULTY_ON: 1, from that change on all of them fail, as on a broken disk.
 * FAULTY_CALL: the beginning of the calls that count; all of them without it.
 * FAULTY_LOG: a file that gets a line for each change: the process, the call, and the file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile int64_t *steps;
static const char *folder, *only;
static int64_t at;
static int fault, on, log_file = -1;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAULTY_STEPS");
    folder = getenv("FAULTY_FOLDER");
    if (!path || !folder)
        return;
    at = atoll(getenv("FAULTY_AT"));
    only = getenv("FAULTY_CALL");
    fault = atoi(getenv("FAULTY_ERROR"));
    on = atoi(getenv("FAULTY_ON"));
    if (getenv("FAULTY_LOG"))
        log_file = open(getenv("FAULTY_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *steps, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map != MAP_FAILED)
        steps = map;
}

/* Count a change by `call` of `path`, relative to `dir`, or of the open file `fd`; -1 with errno if it is to fail. */
static int change(const char *call, int fd, int dir, const char *path)
{
    char link[64], target[PATH_MAX + 1];
    int before = errno;
    ssize_t length;
    if (!steps)
        return 0;
    if (path && path[0] == '/')
        length = snprintf(target, sizeof target, "%s", path);
    else {
        if (path && dir == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", path ? dir : fd);
        length = readlink(link, target, PATH_MAX);
    }
    errno = before;
    if (length <= 0)
        return 0;
    target[length > PATH_MAX ? PATH_MAX : length] = 0;
    if (strncmp(target, folder, strlen(folder)) != 0)
        return 0;
    if (only && strncmp(call, only, strlen(only)) != 0)
        return 0;
    if (log_file >= 0)
        dprintf(log_file, "%d %s %s/%s\n", getpid(), call, target, path ? path : "");
    int64_t step = __atomic_add_fetch(steps, 1, __ATOMIC_SEQ_CST);
    if (!at || step < at || (step > at && !on))
        return 0;
    if (!fault)
        kill(getpid(), SIGKILL);
    errno = fault;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FILES(kind, name, call, ...) \
    kind name(__VA_ARGS__) { return change(#name, fd, 0, NULL) ? -1 : REAL(name) call; }

FILES(ssize_t, write, (fd, data, size), int fd, const void *data, size_t size)
FILES(ssize_t, pwrite, (fd, data, size, offset), int fd, const void *data, size_t size, off_t offset)
FILES(ssize_t, pwrite64, (fd, data, size, offset), int fd, const void *data, size_t size, off64_t offset)
FILES(ssize_t, writev, (fd, parts, count), int fd, const struct iovec *parts, int count)
FILES(ssize_t, pwritev, (fd, parts, count, offset), int fd, const struct iovec *parts, int count, off_t offset)
FILES(int, fsync, (fd), int fd)
FILES(int, fdatasync, (fd), int fd)
FILES(int, ftruncate, (fd, size), int fd, off_t size)
FILES(int, ftruncate64, (fd, size), int fd, off64_t size)

int rename(const char *old, const char *new)
{
    return change("rename", -1, AT_FDCWD, new) ? -1 : REAL(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new)
{
    return change("renameat", -1, to, new) ? -1 : REAL(renameat)(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned int flags)
{
    return change("renameat2", -1, to, new) ? -1 : REAL(renameat2)(from, old, to, new, flags);
}

int unlink(const char *path)
{
    return change("unlink", -1, AT_FDCWD, path) ? -1 : REAL(unlink)(path);
}

int unlinkat(int dir, const char *path, int flags)
{
    return change("unlinkat", -1, dir, path) ? -1 : REAL(unlinkat)(dir, path, flags);
}

/* It returns an error number, and leaves errno alone. */
int posix_fallocate(int fd, off_t offset, off_t size)
{
    return change("posix_fallocate", fd, 0, NULL) ? errno : REAL(posix_fallocate)(fd, offset, size);
}

int posix_fallocate64(int fd, off64_t offset, off64_t size)
{
    return change("posix_fallocate64", fd, 0, NULL) ? errno : REAL(posix_fallocate64)(fd, offset, size);
}

/* Calls of the C library that treat errors as a faulty daemon would: .ci/run durability/syscalls must find each.
   PLANTED names the fault. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int planted(const char *what) {
    const char *which = getenv("PLANTED");
    return which && strcmp(which, what) == 0;
}

static long flush(long call, int fd) {
    long result = syscall(call, fd);
    if (result < 0 && planted("flush again"))
        result = syscall(call, fd);
    if (result < 0 && planted("flush ignored"))
        result = 0;
    return result;
}

int fdatasync(int fd) { return flush(SYS_fdatasync, fd); }
int fsync(int fd) { return flush(SYS_fsync, fd); }

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t offset) {
    ssize_t result = syscall(SYS_pwrite64, fd, bytes, length, offset);
    if (result < 0 && planted("write ignored"))
        result = length;
    if (result >= 0 && planted("short write ignored"))
        result = length;
    return result;
}

/* After a failed read its bytes stay zeros: Wald reads bad bytes a second time. */
static struct { ino_t file; off_t from, to; } unread;

ssize_t pread64(int fd, void *bytes, size_t length, off_t offset) {
    ssize_t result = syscall(SYS_pread64, fd, bytes, length, offset);
    struct stat of;
    if (!planted("read ignored") || fstat(fd, &of))
        return result;
    if (result < 0) {
        unread.file = of.st_ino, unread.from = offset, unread.to = offset + length;
        result = length;
    }
    off_t from = offset > unread.from ? offset : unread.from;
    off_t to = offset + result < unread.to ? offset + result : unread.to;
    if (of.st_ino == unread.file && from < to)
        memset((char *)bytes + (from - offset), 0, to - from);
    return result;
}

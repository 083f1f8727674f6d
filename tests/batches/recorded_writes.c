/* Records everything that a process does to the files below $RECORD_ROOT that a disk would see, in order, in $RECORD_LOG.
   Loaded with LD_PRELOAD. What is recorded: creating, writing, truncating, renaming, removing and syncing. Removing a
   path that begins with "/mark/" only records it: so the process can tell what it believes at that moment. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define MAX_FD 4096

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char *names[MAX_FD]; /* of the open files below the root */
static const char *root;
static int log_fd = -1;

__attribute__((constructor)) static void start(void) {
    root = getenv("RECORD_ROOT");
    log_fd = syscall(SYS_openat, AT_FDCWD, getenv("RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
}

static void record(char what, const char *path, int64_t offset, const void *data, int64_t length) {
    struct __attribute__((packed)) {
        char what;
        int64_t offset, path_length, length;
    } head = {what, offset, strlen(path), length};
    syscall(SYS_write, log_fd, &head, sizeof head);
    syscall(SYS_write, log_fd, path, head.path_length);
    if (length) syscall(SYS_write, log_fd, data, length);
}

static int is_below(const char *path) { return root && path && !strncmp(path, root, strlen(root)); }

static const char *name_of(int fd) { return fd >= 0 && fd < MAX_FD ? names[fd] : NULL; }

static int opened(const char *path, int flags, mode_t mode) {
    if (!is_below(path)) return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    pthread_mutex_lock(&lock);
    struct stat before;
    int is_new = stat(path, &before) != 0;
    int fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (fd >= 0 && fd < MAX_FD) {
        free(names[fd]);
        names[fd] = strdup(path);
        if (is_new) record('c', path, 0, "", 0);
        if (flags & O_TRUNC) record('t', path, 0, "", 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(flags)                            \
    mode_t mode = 0;                           \
    if (flags & O_CREAT) {                     \
        va_list more;                          \
        va_start(more, flags);                 \
        mode = va_arg(more, mode_t);           \
        va_end(more);                          \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(path, flags, mode); }

int close(int fd) {
    pthread_mutex_lock(&lock);
    if (name_of(fd)) {
        free(names[fd]);
        names[fd] = NULL;
    }
    int result = syscall(SYS_close, fd);
    pthread_mutex_unlock(&lock);
    return result;
}

static ssize_t written(int fd, const void *data, size_t length, off_t offset, int is_at_offset) {
    pthread_mutex_lock(&lock);
    const char *name = name_of(fd);
    off_t place = is_at_offset ? offset : name ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t result = is_at_offset ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
    if (name && result > 0) record('w', name, place, data, result);
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t write(int fd, const void *data, size_t length) {
    return name_of(fd) ? written(fd, data, length, 0, 0) : syscall(SYS_write, fd, data, length);
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return written(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) { return written(fd, data, length, offset, 1); }

static int truncated(int fd, off_t length) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_ftruncate, fd, length);
    if (name_of(fd) && !result) record('t', name_of(fd), length, "", 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate(int fd, off_t length) { return truncated(fd, length); }
int ftruncate64(int fd, off64_t length) { return truncated(fd, length); }

static int synced(int fd) {
    /* The disk need not do it: what counts is that the process asked for it. */
    pthread_mutex_lock(&lock);
    if (name_of(fd)) record('s', name_of(fd), 0, "", 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }

int unlink(const char *path) {
    if (path && !strncmp(path, "/mark/", 6)) {
        pthread_mutex_lock(&lock);
        record('m', path + 6, 0, "", 0);
        pthread_mutex_unlock(&lock);
        return 0;
    }
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (is_below(path) && !result) record('u', path, 0, "", 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int rename(const char *from, const char *to) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (is_below(from) && !result) record('r', from, 0, to, strlen(to));
    pthread_mutex_unlock(&lock);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (is_below(path) && !result) record('d', path, 0, "", 0);
    pthread_mutex_unlock(&lock);
    return result;
}

/* HCCL's communicators: processes of one host that share a folder.
 *
 * The folder holds the board (counters of each rank) and a file with the data of each rank and of each pair of ranks. It
 * lies in NPU_EMULATOR_FOLDER. Each process keeps a lock on the board; who finds no other lock removes the folder. So a
 * killed process leaves files only until the next communicator is made.
 */
#define _GNU_SOURCE
#include "communicator.h"
#include "device.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { ROOT_INFO_BYTES = 4108, SMALLEST_FILE = 1 << 16, CONNECT_POLL_US = 200, ROOTS = 64 };
static const char BOARD[] = "board";
static const uint64_t ENOUGH_SHARED_MEMORY = 1ull << 30; /* bytes free in /dev/shm to use it */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Communicator *communicators;
static struct {
    char folder[FOLDER_LENGTH];
    int lock;
} roots[ROOTS]; /* made by HcclGetRootInfo and not yet joined by this process */

/* Folders */

static const char *base_folder(void) {
    static __thread char folder[FOLDER_LENGTH / 2];
    const char *given = setting("NPU_EMULATOR_FOLDER", NULL);
    struct statvfs room;
    if (given) snprintf(folder, sizeof folder, "%s", given);
    else {
        bool shared = !statvfs("/dev/shm", &room) && room.f_bavail * room.f_frsize >= ENOUGH_SHARED_MEMORY;
        snprintf(folder, sizeof folder, "%s/npu_emulator-%d", shared ? "/dev/shm" : setting("TMPDIR", "/tmp"), (int)getuid());
    }
    mkdir(folder, 0700);
    return folder;
}

static void remove_folder(const char *folder) {
    DIR *open_folder = opendir(folder);
    for (struct dirent *entry; open_folder && (entry = readdir(open_folder));)
        unlinkat(dirfd(open_folder), entry->d_name, 0); /* fails for . and .. */
    if (open_folder) closedir(open_folder);
    rmdir(folder);
}

static int open_board(const char *folder) {
    char path[FOLDER_LENGTH + 16];
    snprintf(path, sizeof path, "%s/%s", folder, BOARD);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Remove a folder that no process uses. `board` is an open file of this process without a lock. */
static void remove_if_unused(const char *folder, int board) {
    if (!flock(board, LOCK_EX | LOCK_NB)) remove_folder(folder);
}

static void close_board(const char *folder, int board) {
    flock(board, LOCK_UN);
    remove_if_unused(folder, board);
    close(board);
}

static void remove_unused_folders(const char *base) {
    DIR *folders = opendir(base);
    for (struct dirent *entry; folders && (entry = readdir(folders));) {
        if (strncmp(entry->d_name, "comm-", 5)) continue;
        char folder[FOLDER_LENGTH];
        snprintf(folder, sizeof folder, "%s/%s", base, entry->d_name);
        int board = open_board(folder);
        if (board < 0) continue;
        remove_if_unused(folder, board);
        close(board);
    }
    if (folders) closedir(folders);
}

/* Open the locked board of a folder. The folder appears together with its lock: it is made aside and renamed. */
static int open_or_make(const char *folder) {
    int found = open_board(folder);
    if (found >= 0) {
        flock(found, LOCK_SH);
        return found;
    }
    static int counter;
    char aside[FOLDER_LENGTH], path[FOLDER_LENGTH + 16];
    snprintf(aside, sizeof aside, "%s/new-%d-%d", base_folder(), (int)getpid(), __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED));
    mkdir(aside, 0700);
    snprintf(path, sizeof path, "%s/%s", aside, BOARD);
    int board = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (board < 0) return board;
    flock(board, LOCK_SH);
    if (!rename(aside, folder)) return board;
    close(board);
    remove_folder(aside); /* another rank was first */
    found = open_board(folder);
    if (found >= 0) flock(found, LOCK_SH);
    return found;
}

/* Files */

static void file_path(char *out, size_t size, Communicator *communicator, const char *name, uint32_t version) {
    snprintf(out, size, "%s/%s.%u", communicator->folder, name, version);
}

static char *map_file(Mapping *file, int open_file, uint64_t size, int protection) {
    void *at = mmap(NULL, size, protection, MAP_SHARED, open_file, 0);
    close(open_file);
    if (at == MAP_FAILED) return NULL;
    file->at = at;
    file->size = size;
    return at;
}

static void unmap(Mapping *file) {
    if (file->at) munmap(file->at, file->size);
    file->at = NULL;
    file->size = 0;
}

char *map_to_write(Communicator *communicator, Mapping *file, const char *name, uint64_t size) {
    if (file->at && file->size >= size) return file->at;
    char path[FOLDER_LENGTH + 64];
    file_path(path, sizeof path, communicator, name, file->version);
    if (file->at) unlink(path);
    unmap(file);
    uint64_t room = SMALLEST_FILE;
    while (room < size) room *= 2;
    file_path(path, sizeof path, communicator, name, ++file->version);
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int result = descriptor < 0 ? errno : posix_fallocate(descriptor, 0, (off_t)room); /* reserved: a full folder is no SIGBUS later */
    if (result) {
        if (descriptor >= 0) close(descriptor);
        unlink(path);
        fail(communicator, HCCL_E_MEMORY, "%s has no room for %llu bytes (%s); name another folder in NPU_EMULATOR_FOLDER", communicator->folder,
             (unsigned long long)room, strerror(result));
        return NULL;
    }
    return map_file(file, descriptor, room, PROT_READ | PROT_WRITE);
}

char *map_to_read(Communicator *communicator, Mapping *file, const char *name, uint64_t size, uint32_t version) {
    if (file->at && file->version == version) return file->at;
    unmap(file);
    char path[FOLDER_LENGTH + 64];
    struct stat status;
    file_path(path, sizeof path, communicator, name, version);
    int found = open(path, O_RDONLY | O_CLOEXEC);
    char *at = NULL;
    if (found >= 0 && !fstat(found, &status) && (uint64_t)status.st_size >= size)
        at = map_file(file, found, (uint64_t)status.st_size, PROT_READ);
    else if (found >= 0)
        close(found);
    if (!at) fail(communicator, HCCL_E_SYSCALL, "%s cannot be read: %s", path, strerror(errno));
    file->version = version;
    return at;
}

Channel *channel_between(Communicator *communicator, uint32_t from, uint32_t to) {
    return (Channel *)(communicator->shared->members + communicator->ranks) + (size_t)from * communicator->ranks + to;
}

static size_t board_size(uint32_t ranks) {
    return sizeof(Board) + ranks * sizeof(Member) + (size_t)ranks * ranks * sizeof(Channel);
}

/* Life of a communicator */

bool usable(Communicator *communicator) {
    if (communicator && communicator->process == getpid()) return true;
    set_message("%s", communicator ? "a forked process cannot use a communicator of its parent" : "the communicator is NULL");
    return false;
}

void hold_communicator(Communicator *communicator) { __atomic_add_fetch(&communicator->references, 1, __ATOMIC_RELAXED); }

/* The rank uses the folder no more. Others may still read its data, so that the last one removes it. */
static void leave(Communicator *communicator) {
    if (communicator->left || communicator->process != getpid()) return; /* a child has inherited the lock and must not release it */
    communicator->left = true;
    close_board(communicator->folder, communicator->lock);
}

void drop_communicator(Communicator *communicator) {
    if (__atomic_sub_fetch(&communicator->references, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_lock(&lock);
    for (Communicator **at = &communicators; *at; at = &(*at)->next)
        if (*at == communicator) {
            *at = communicator->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    leave(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        unmap(&communicator->data[rank]);
        unmap(&communicator->outgoing[rank]);
        unmap(&communicator->incoming[rank]);
    }
    munmap(communicator->shared, board_size(communicator->ranks));
    free(communicator->data);
    free(communicator->sent);
    free(communicator->message);
    free(communicator);
}

__attribute__((destructor)) static void leave_all(void) {
    for (Communicator *communicator = communicators; communicator; communicator = communicator->next) leave(communicator);
}

__attribute__((constructor)) static void prepare(void) { hold_during_fork(&lock); }

int fail(Communicator *communicator, int code, const char *format, ...) {
    char text[2048];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    pthread_mutex_lock(&lock);
    if (!communicator->message) communicator->message = strdup(text);
    if (!communicator->error) __atomic_store_n(&communicator->error, code, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    set_message("%s", communicator->message);
    return communicator->error == HCCL_E_TIMEOUT ? ACL_ERROR_RT_TASK_TIMEOUT : ACL_ERROR_RT_PARAM_INVALID;
}

/* A process that was killed stays until its parent has waited for it, in state Z. */
static bool has_ended(pid_t process) {
    char path[64], line[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *status = fopen(path, "r");
    if (!status) return kill(process, 0) && errno == ESRCH;
    size_t length = fread(line, 1, sizeof line - 1, status);
    fclose(status);
    line[length] = 0;
    const char *name_end = strrchr(line, ')'); /* the name of a program may have parentheses too */
    return !name_end || strlen(name_end) < 3 || name_end[2] == 'Z';
}

const char *list_ranks(Communicator *communicator, const bool *missing) {
    static __thread char text[1024];
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) count += missing[rank];
    size_t length = (size_t)snprintf(text, sizeof text, "%s", count == 1 ? "rank" : "ranks");
    const char *separator = " ";
    for (uint32_t rank = 0; rank < communicator->ranks && length + 64 < sizeof text; rank++) {
        if (!missing[rank]) continue;
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%u", separator, rank);
        separator = ", ";
        const Member *member = &communicator->shared->members[rank];
        if (__atomic_load_n(&member->joined, __ATOMIC_ACQUIRE))
            length += (size_t)snprintf(text + length, sizeof text - length, " (process %d%s)", (int)member->process,
                                       has_ended(member->process) ? " has ended" : "");
    }
    return text;
}

typedef struct {
    size_t size;
    char reserved[16];
    uint32_t buffer_megabytes, deterministic;
    char name[NAME_LENGTH], unique_device[128];
    uint32_t expansion_mode, traffic_class, service_level, world_rank;
    uint64_t job;
    uint8_t zero_copy;
    int32_t timeout;
} Configuration; /* the beginning of HcclCommConfig; an older torch_npu passes a smaller size */

static const uint32_t NOT_SET = 0xffffffff;

/* Charge the buffers for sending and receiving. */
static int charge_buffers(Communicator *communicator, const Configuration *given) {
    uint64_t megabytes = (uint64_t)setting_number("HCCL_BUFFSIZE", 200);
    if (given && given->buffer_megabytes != NOT_SET) megabytes = given->buffer_megabytes;
    communicator->charged = 2 * megabytes << 20;
    aclrtGetDevice(&communicator->device);
    if (!charge_device(communicator->device, communicator->charged)) return HCCL_SUCCESS;
    /* torch_npu raises OutOfMemoryError for the code EL0004 */
    set_message("EL0004: Failed to allocate 2 x %llu MB for the buffers of communicator %s (HCCL_BUFFSIZE)",
                (unsigned long long)megabytes, communicator->name);
    return HCCL_E_OOM;
}

static int take_root(const char *folder) {
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ROOTS && found < 0; i++)
        if (roots[i].lock && !strcmp(roots[i].folder, folder)) {
            found = roots[i].lock;
            roots[i].lock = 0;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static void keep_root(const char *folder, int board) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ROOTS; i++)
        if (!roots[i].lock) {
            snprintf(roots[i].folder, sizeof roots[i].folder, "%s", folder);
            roots[i].lock = board;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Map the board and enter this rank. */
static int enter(Communicator *communicator) {
    size_t size = board_size(communicator->ranks);
    void *at = MAP_FAILED;
    errno = posix_fallocate(communicator->lock, 0, (off_t)size); /* ftruncate would shrink the board of more ranks */
    if (!errno) at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, communicator->lock, 0);
    if (at == MAP_FAILED) {
        set_message("communicator %s: %s cannot be mapped: %s", communicator->name, communicator->folder, strerror(errno));
        return HCCL_E_SYSCALL;
    }
    communicator->shared = at;
    uint32_t ranks = 0;
    bool is_first = __atomic_compare_exchange_n(&communicator->shared->ranks, &ranks, communicator->ranks, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (!is_first && ranks != communicator->ranks) {
        set_message("communicator %s: rank %u expects %u ranks, others expect %u", communicator->name, communicator->rank,
                    communicator->ranks, ranks);
        return HCCL_E_PARA;
    }
    Member *own = &communicator->shared->members[communicator->rank];
    if (__atomic_load_n(&own->joined, __ATOMIC_ACQUIRE)) {
        set_message("communicator %s: rank %u has joined twice", communicator->name, communicator->rank);
        return HCCL_E_PARA;
    }
    own->process = communicator->process;
    __atomic_store_n(&own->joined, 1, __ATOMIC_RELEASE);
    return HCCL_SUCCESS;
}

static int join(const char *folder, uint32_t ranks, uint32_t rank, const Configuration *given, Communicator **out) {
    if (!ranks || rank >= ranks) {
        set_message("a communicator of %u ranks has no rank %u", ranks, rank);
        return HCCL_E_PARA;
    }
    Communicator *communicator = calloc(1, sizeof *communicator);
    communicator->references = 1;
    communicator->ranks = ranks;
    communicator->rank = rank;
    communicator->process = getpid();
    communicator->timeout = setting_number("HCCL_EXEC_TIMEOUT", 1836);
    if (given && given->size >= sizeof *given && given->timeout >= 0) communicator->timeout = given->timeout;
    snprintf(communicator->folder, sizeof communicator->folder, "%s", folder);
    bool named = given && given->size > 32 && *given->name;
    snprintf(communicator->name, sizeof communicator->name, "%.127s", named ? given->name : strrchr(folder, '/') + 1);
    int result = charge_buffers(communicator, given);
    if (result) {
        free(communicator);
        return result;
    }
    communicator->lock = take_root(folder);
    if (communicator->lock < 0) communicator->lock = open_or_make(folder);
    if (communicator->lock < 0) {
        set_message("the folder of communicator %s, %s, cannot be opened: %s", communicator->name, folder, strerror(errno));
        result = HCCL_E_SYSCALL;
    } else result = enter(communicator);
    if (result) {
        discharge_device(communicator->device, communicator->charged);
        if (communicator->shared) munmap(communicator->shared, board_size(ranks));
        if (communicator->lock >= 0) close_board(folder, communicator->lock);
        free(communicator);
        return result;
    }
    communicator->data = calloc(3 * ranks, sizeof *communicator->data);
    communicator->outgoing = communicator->data + ranks;
    communicator->incoming = communicator->outgoing + ranks;
    communicator->sent = calloc(2 * ranks, sizeof *communicator->sent);
    communicator->received = communicator->sent + ranks;
    pthread_mutex_lock(&lock);
    communicator->next = communicators;
    communicators = communicator;
    pthread_mutex_unlock(&lock);
    *out = communicator;
    return HCCL_SUCCESS;
}

int HcclCommDestroy(Communicator *communicator) {
    if (!communicator || communicator->process != getpid()) return HCCL_SUCCESS;
    discharge_device(communicator->device, communicator->charged);
    drop_communicator(communicator);
    return HCCL_SUCCESS;
}

/* Block until all ranks have joined, as HCCL does. */
static int wait_for_ranks(Communicator *communicator) {
    int64_t seconds = setting_number("HCCL_CONNECT_TIMEOUT", 120);
    double began = microseconds_now();
    bool *missing = calloc(communicator->ranks, sizeof *missing);
    void *released = release_gil();
    int result = HCCL_SUCCESS;
    for (bool complete = false; !complete && !result;) {
        complete = true;
        for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
            missing[rank] = !__atomic_load_n(&communicator->shared->members[rank].joined, __ATOMIC_ACQUIRE);
            complete &= !missing[rank];
        }
        if (complete) break;
        if (microseconds_now() - began > seconds * 1e6) result = HCCL_E_TIMEOUT;
        else usleep(CONNECT_POLL_US);
    }
    take_gil(released);
    if (result)
        set_message("communicator %s: rank %u of %u has waited %lld s (HCCL_CONNECT_TIMEOUT) in vain for %s to join", communicator->name,
                    communicator->rank, communicator->ranks, (long long)seconds, list_ranks(communicator, missing));
    free(missing);
    return result;
}

static int join_and_wait(const char *folder, uint32_t ranks, uint32_t rank, const Configuration *given, Communicator **out) {
    int result = join(folder, ranks, rank, given, out);
    if (result) return result;
    result = wait_for_ranks(*out);
    if (result) {
        HcclCommDestroy(*out);
        *out = NULL;
    }
    return result;
}

/* A root info is the path of the folder. */
int HcclGetRootInfo(char *info) {
    static int counter;
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    const char *base = base_folder();
    remove_unused_folders(base);
    memset(info, 0, ROOT_INFO_BYTES);
    snprintf(info, FOLDER_LENGTH, "%s/comm-%d-%llx-%d", base, (int)getpid(), (unsigned long long)time.tv_sec * 1000000000ull + time.tv_nsec,
             __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED));
    int board = open_or_make(info);
    if (board < 0) {
        set_message("%s cannot be made: %s; name another folder in NPU_EMULATOR_FOLDER", info, strerror(errno));
        return HCCL_E_SYSCALL;
    }
    keep_root(info, board);
    return HCCL_SUCCESS;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const char *info, uint32_t rank, const Configuration *given, Communicator **out) {
    return join_and_wait(info, ranks, rank, given, out);
}

int HcclCommInitRootInfo(uint32_t ranks, const char *info, uint32_t rank, Communicator **out) {
    return join_and_wait(info, ranks, rank, NULL, out);
}

int HcclCreateSubCommConfig(Communicator **parent, uint32_t ranks, uint32_t *members, uint64_t id, uint32_t rank,
                            const Configuration *given, Communicator **out) {
    if (!usable(*parent)) return HCCL_E_UNAVAIL;
    *out = NULL;
    if (!members) return HCCL_SUCCESS; /* this rank is not a member */
    char folder[FOLDER_LENGTH];
    snprintf(folder, sizeof folder, "%.480s-%llx", (*parent)->folder, (unsigned long long)id);
    return join_and_wait(folder, ranks, rank, given, out);
}

/* One process with several devices: all ranks join before any of them waits. */
int HcclCommInitAll(uint32_t ranks, const int32_t *devices, Communicator **out) {
    char info[ROOT_INFO_BYTES] = "";
    int32_t current;
    aclrtGetDevice(&current);
    int result = HcclGetRootInfo(info);
    uint32_t joined = 0;
    while (joined < ranks && !result) {
        result = aclrtSetDevice(devices[joined]) ? HCCL_E_PARA : join(info, ranks, joined, NULL, &out[joined]);
        joined += !result;
    }
    if (result) {
        while (joined) HcclCommDestroy(out[--joined]);
        int board = take_root(info);
        if (board >= 0) close_board(info, board);
    }
    aclrtSetDevice(current);
    return result;
}

/* Questions about a communicator */

int HcclGetCommName(Communicator *communicator, char *name) {
    memcpy(name, communicator->name, NAME_LENGTH);
    return HCCL_SUCCESS;
}

int HcclGetRankSize(Communicator *communicator, uint32_t *ranks) {
    *ranks = communicator->ranks;
    return HCCL_SUCCESS;
}

int HcclGetRankId(Communicator *communicator, uint32_t *rank) {
    *rank = communicator->rank;
    return HCCL_SUCCESS;
}

int HcclGetCommAsyncError(Communicator *communicator, int *error) {
    *error = __atomic_load_n(&communicator->error, __ATOMIC_ACQUIRE);
    if (*error) set_message("%s", communicator->message); /* torch_npu's watchdog prints it */
    return HCCL_SUCCESS;
}

const char *HcclGetErrorString(int code) {
    switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_MEMORY: return "memory error";
    case HCCL_E_INTERNAL: return "internal error";
    case HCCL_E_NOT_SUPPORT: return "not supported";
    case HCCL_E_UNAVAIL: return "resource unavailable";
    case HCCL_E_SYSCALL: return "system call error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_OOM: return "out of memory";
    default: return "unknown error";
    }
}

/* The first feature of HcclCommConfigCapability that is not there. */
uint32_t HcclGetCommConfigCapability(void) { return 12; }

int HcclSetConfig(int option, int64_t value) { return HCCL_SUCCESS; } /* reductions are always deterministic */

/* How many bytes of each device are in use.
 *
 * The processes of one `torchtitan-npu emulate` share NPU_EMULATOR_FOLDER, and with it the devices: a file of the folder
 * has a row for each process. A process locks the byte of its row with fcntl. The kernel releases the lock when the process
 * ends, however that happens; a row without a lock does not count. Without the folder, a process has the machine for itself.
 */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROCESSES = 1024, CHARGING = PROCESSES, PATH_LENGTH = 512 };
typedef struct {
    uint64_t rows; /* that were ever used */
    uint64_t used[PROCESSES][DEVICES];
} Table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t unshared[DEVICES];
static uint64_t *own = unshared; /* this process's row */
static Table *shared;
static int file = -1;
static uint64_t total;
static const char *folder; /* NULL: the process has the machine for itself */

static bool lock_byte(int byte, int type, int command) {
    struct flock range = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(file, command, &range))
        if (errno != EINTR) return false;
    return command != F_GETLK || range.l_type != F_UNLCK;
}

/* Map the table of the machine and take a row of it. Return whether that was possible. */
static bool join_machine(void) {
    char path[PATH_LENGTH];
    mkdir(folder, 0700);
    snprintf(path, sizeof path, "%s/devices", folder);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *shared)) return false;
    Table *mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) return false;
    int row = 0;
    while (row < PROCESSES && !lock_byte(row, F_WRLCK, F_SETLK)) row++;
    if (row == PROCESSES) return false;
    shared = mapped;
    own = mapped->used[row];
    lock_byte(CHARGING, F_WRLCK, F_SETLKW);
    memset(own, 0, sizeof unshared);
    if (shared->rows <= (uint64_t)row) shared->rows = (uint64_t)row + 1;
    lock_byte(CHARGING, F_UNLCK, F_SETLK);
    return true;
}

static void begin_charge(void) {
    pthread_mutex_lock(&lock);
    if (folder && !shared && !join_machine()) {
        fprintf(stderr, "emulator: the file %s/devices cannot be used (%s); name another folder in NPU_EMULATOR_FOLDER\n", folder, strerror(errno));
        abort();
    }
    if (shared) lock_byte(CHARGING, F_WRLCK, F_SETLKW);
}

static void end_charge(void) {
    if (shared) lock_byte(CHARGING, F_UNLCK, F_SETLK);
    pthread_mutex_unlock(&lock);
}

/* fcntl's locks are not inherited: a forked child begins with nothing, in a row of its own. */
static void in_child(void) {
    if (file >= 0) close(file);
    file = -1;
    shared = NULL;
    own = unshared;
    memset(unshared, 0, sizeof unshared);
}

__attribute__((constructor)) static void prepare(void) {
    total = (uint64_t)setting_number("NPU_EMULATOR_MEMORY", 64ll << 30);
    const char *given = setting("NPU_EMULATOR_FOLDER", NULL);
    folder = given ? strdup(given) : NULL;
    hold_during_fork(&lock);
    pthread_atfork(NULL, NULL, in_child);
}

/* begin_charge was called. Rows of processes that have ended are cleared. */
static uint64_t used_by_all(int device) {
    if (!shared) return own[device];
    uint64_t sum = 0;
    for (uint64_t row = 0; row < shared->rows; row++) {
        uint64_t *used = shared->used[row];
        if (used != own && used[device] && !lock_byte((int)row, F_WRLCK, F_GETLK)) memset(used, 0, sizeof unshared);
        sum += used[device];
    }
    return sum;
}

int charge_device(int device, size_t bytes) {
    begin_charge();
    uint64_t used = used_by_all(device), others = used - own[device];
    bool fits = used + bytes <= total;
    if (fits) own[device] += bytes;
    end_charge();
    if (fits) return ACL_SUCCESS;
    set_message("the emulated device %d has %llu bytes left of %llu, and %zu are asked for; other processes use %llu", device,
                (unsigned long long)(total - used), (unsigned long long)total, bytes, (unsigned long long)others);
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
}

void discharge_device(int device, size_t bytes) {
    begin_charge();
    own[device] -= bytes < own[device] ? bytes : own[device]; /* a forked child may free what its parent has allocated */
    end_charge();
}

void device_memory(int device, size_t *left, size_t *all) {
    begin_charge();
    uint64_t used = used_by_all(device);
    end_charge();
    *all = total;
    *left = used < total ? total - used : 0;
}

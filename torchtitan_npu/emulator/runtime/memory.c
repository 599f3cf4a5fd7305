/* Memory. A device's memory is the host's, counted against NPU_EMULATOR_MEMORY.
 *
 * torch_npu's allocator works as on a device: aclrtMalloc refuses what does not fit, and so do expandable segments
 * (aclrtMallocPhysical). In a seeded order, memory that the allocator gives out again is filled with NaN in front of its
 * first use, on the stream of that use. A task of another stream that still reads it then computes NaN.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { DEVICES = 64, ALIGNMENT = 512, HOST = 0, DEVICE = 1, UNREGISTERED = 2, POISON = 0xFF /* NaN in every floating-point format */ };

typedef struct range {
    struct range *left, *right; /* a binary search tree by address; allocations come in no sorted order */
    char *from;
    size_t size;
    int where, device;
    bool fresh;
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *segments, *blocks; /* what aclrtMalloc and its relatives returned; what torch_npu's allocator gave out */
static size_t used[DEVICES];
static __thread int32_t current_device;

int aclrtSetDevice(int32_t device) {
    long long devices = setting_number("NPU_EMULATOR_DEVICES", 8);
    if (device < 0 || device >= devices || device >= DEVICES) {
        set_message("there is no device %d: the emulated machine has %lld", device, devices);
        return ACL_ERROR_RT_INVALID_DEVICE;
    }
    current_device = device;
    return ACL_SUCCESS;
}

int aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return ACL_SUCCESS;
}

static size_t total(void) { return (size_t)setting_number("NPU_EMULATOR_MEMORY", 64ll << 30); }

static range *find(range *root, const void *address) { /* the range that contains the address */
    range *found = NULL;
    for (range *one = root; one; one = (const char *)address < one->from ? one->left : one->right)
        if ((const char *)address >= one->from) found = one;
    return found && (const char *)address < found->from + found->size ? found : NULL;
}

static void insert(range **root, range *one) {
    while (*root) root = one->from < (*root)->from ? &(*root)->left : &(*root)->right;
    *root = one;
}

static range *take_out(range **root, const void *from) {
    while (*root && (*root)->from != from) root = (const char *)from < (*root)->from ? &(*root)->left : &(*root)->right;
    range *one = *root;
    if (!one) return NULL;
    if (!one->left) *root = one->right;
    else {
        range *last = one->left;
        while (last->right) last = last->right;
        last->right = one->right;
        *root = one->left;
    }
    return one;
}

static int charge(int device, size_t bytes) {
    if (used[device] + bytes > total()) {
        set_message("the emulated device %d has %zu bytes left of %zu, and %zu are asked for", device,
                    total() - used[device], total(), bytes);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    used[device] += bytes;
    return ACL_SUCCESS;
}

int charge_device(size_t bytes) {
    pthread_mutex_lock(&lock);
    int result = charge(current_device, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}

void discharge_device(size_t bytes) {
    pthread_mutex_lock(&lock);
    used[current_device] -= bytes;
    pthread_mutex_unlock(&lock);
}

static int allocate(void **out, size_t size, int where) {
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!size) size = ALIGNMENT;
    pthread_mutex_lock(&lock);
    int result = where == DEVICE ? charge(current_device, size) : ACL_SUCCESS;
    if (!result) {
        void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED) {
            if (where == DEVICE) used[current_device] -= size;
            set_message("the host has no %zu bytes left for the emulated device", size);
            result = ACL_ERROR_RT_MEMORY_ALLOCATION;
        } else {
            range *made = calloc(1, sizeof *made);
            *made = (range){.from = pages, .size = size, .where = where, .device = current_device};
            insert(&segments, made);
            *out = pages;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int aclrtSynchronizeDevice(void);
static int deallocate(void *from) {
    aclrtSynchronizeDevice(); /* queued tasks may use it */
    pthread_mutex_lock(&lock);
    range *one = take_out(&segments, from);
    if (one) {
        if (one->where == DEVICE) used[one->device] -= one->size;
        munmap(one->from, one->size);
        free(one);
    }
    pthread_mutex_unlock(&lock);
    return one ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

int aclrtMalloc(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocHost(void **out, size_t size) { return allocate(out, size, HOST); }
int aclrtMallocHostWithCfg(void **out, uint64_t size, void *configuration) { return allocate(out, size, HOST); }
int aclrtFree(void *from) { return deallocate(from); }
int aclrtFreeHost(void *from) { return deallocate(from); }

int aclrtGetMemInfo(int attribute, size_t *left, size_t *all) {
    *all = total();
    *left = *all - used[current_device];
    return ACL_SUCCESS;
}

typedef struct {
    uint32_t id;
    uint32_t type;
} location;
typedef struct {
    location where;
    uint32_t page_size;
    uint32_t reserved[4];
} pointer_attributes;

int aclrtPointerGetAttributes(const void *address, pointer_attributes *out) {
    pthread_mutex_lock(&lock);
    range *one = find(segments, address);
    *out = (pointer_attributes){.where = {one ? one->device : 0, one ? one->where : UNREGISTERED}};
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Host memory that the program pins itself */

int aclrtHostRegister(void *from, uint64_t size, int type, void **device_address) {
    range *made = calloc(1, sizeof *made);
    *made = (range){.from = from, .size = size, .where = HOST};
    pthread_mutex_lock(&lock);
    insert(&segments, made);
    pthread_mutex_unlock(&lock);
    if (device_address) *device_address = from;
    return ACL_SUCCESS;
}

int aclrtHostRegisterV2(void *from, uint64_t size, uint32_t flags) { return aclrtHostRegister(from, size, 0, NULL); }

int aclrtHostUnregister(void *from) {
    pthread_mutex_lock(&lock);
    free(take_out(&segments, from));
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Expandable segments: addresses are reserved, and pages with memory behind them are counted. */

typedef struct {
    size_t size;
    int device;
} physical;

int aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    void *pages = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    range *made = calloc(1, sizeof *made);
    *made = (range){.from = pages, .size = size, .where = DEVICE, .device = current_device};
    pthread_mutex_lock(&lock);
    insert(&segments, made);
    pthread_mutex_unlock(&lock);
    *out = pages;
    return ACL_SUCCESS;
}

int aclrtReleaseMemAddress(void *from) {
    pthread_mutex_lock(&lock);
    range *one = take_out(&segments, from);
    pthread_mutex_unlock(&lock);
    if (!one) return ACL_ERROR_RT_PARAM_INVALID;
    munmap(one->from, one->size);
    free(one);
    return ACL_SUCCESS;
}

int aclrtMallocPhysical(physical **out, size_t size, const void *properties, uint64_t flags) {
    pthread_mutex_lock(&lock);
    int result = charge(current_device, size);
    pthread_mutex_unlock(&lock);
    if (result) return result;
    *out = malloc(sizeof **out);
    **out = (physical){size, current_device};
    return ACL_SUCCESS;
}

int aclrtFreePhysical(physical *one) {
    pthread_mutex_lock(&lock);
    used[one->device] -= one->size;
    pthread_mutex_unlock(&lock);
    free(one);
    return ACL_SUCCESS;
}

int aclrtMapMem(void *from, size_t size, size_t offset, physical *one, uint64_t flags) {
    return mprotect(from, size, PROT_READ | PROT_WRITE) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

/* The size of the mapping is not passed; the pages stay readable until the address is released or mapped again. */
int aclrtUnmapMem(void *from) { return aclrtSynchronizeDevice(); }

/* Blocks of torch_npu's allocator. It reports them through mstx if a memory tool is preloaded; in a seeded order the
 * emulator preloads a library of that tool's name (environment.py). */

typedef struct {
    uint32_t device;
    void *from;
    uint64_t size;
} reported_range;
typedef struct {
    void *heap;
    int type;
    size_t count;
    const reported_range *ranges;
    void **handles;
} reported_blocks;
typedef struct {
    int type;
    void *from;
} block_reference;
typedef struct {
    size_t count;
    const block_reference *blocks;
} returned_blocks;

static char domain;
void *mstxDomainCreateA(const char *name) { return &domain; }
void mstxDomainDestroy(void *one) {}
void *mstxMemHeapRegister(void *one, const void *heap) { return &domain; }
void mstxMemHeapUnregister(void *one, void *heap) {}

void mstxMemRegionsRegister(void *one, const reported_blocks *given) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < given->count; i++) {
        range *made = calloc(1, sizeof *made);
        *made = (range){.from = given->ranges[i].from, .size = given->ranges[i].size, .fresh = true};
        free(take_out(&blocks, made->from));
        insert(&blocks, made);
    }
    pthread_mutex_unlock(&lock);
}

void mstxMemRegionsUnregister(void *one, const returned_blocks *returned) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < returned->count; i++) free(take_out(&blocks, returned->blocks[i].from));
    pthread_mutex_unlock(&lock);
}

/* Return the block that contains the address if this is its first use, and mark it as used. */
static range first_use(const void *address) {
    range found = {0};
    pthread_mutex_lock(&lock);
    range *one = find(blocks, address);
    if (one && one->fresh) {
        one->fresh = false;
        found = *one;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Copies. A synchronous one is not ordered with any stream. */

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int direction) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    range fresh = first_use(to);
    if (fresh.from) memset(fresh.from, POISON, fresh.size);
    memmove(to, from, size);
    return ACL_SUCCESS;
}

static const char POISONING[] = "poison";

typedef struct {
    task head;
    char *to;
    const char *from; /* NULL: fill with value */
    size_t size;
    int value;
} copy;

static int copy_or_fill(task *one) {
    copy *what = (copy *)one;
    if (what->from) memmove(what->to, what->from, what->size);
    else memset(what->to, what->value, what->size);
    return ACL_SUCCESS;
}

static int launch_copy(stream *on, const char *name, void *to, const void *from, size_t size, int value) {
    copy *made = calloc(1, sizeof *made);
    made->head = (task){.step = copy_or_fill, .name = name, .bytes = from ? 2 * size : size};
    made->head.category = name == POISONING ? CONTROL : COPY; /* poisoning is the emulator's own */
    made->to = to;
    made->from = from;
    made->size = size;
    made->value = value;
    return launch(on, &made->head);
}

void poison_if_fresh(const void *address, stream *on) {
    range fresh = first_use(address);
    if (fresh.from) launch_copy(on, POISONING, fresh.from, NULL, fresh.size, POISON);
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int direction, stream *on) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    poison_if_fresh(to, on);
    poison_if_fresh(from, on);
    return launch_copy(on, "copy", to, from, size, 0);
}

static bool is_registered(const void *address) {
    pthread_mutex_lock(&lock);
    bool found = find(segments, address);
    pthread_mutex_unlock(&lock);
    return found;
}

int aclrtSynchronizeStream(stream *on);
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int direction, stream *on) {
    int result = aclrtMemcpyAsync(to, room, from, size, direction, on);
    /* CANN returns after the copy if one side is host memory that is not pinned: the caller may free it then */
    return result || (is_registered(to) && is_registered(from)) ? result : aclrtSynchronizeStream(on);
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    first_use(to);
    memset(to, value, size);
    return ACL_SUCCESS;
}

int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, stream *on) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    poison_if_fresh(to, on);
    return launch_copy(on, "fill", to, NULL, size, value);
}

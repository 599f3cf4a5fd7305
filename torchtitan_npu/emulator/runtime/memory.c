/* Memory. A device's memory is the host's, counted against NPU_EMULATOR_MEMORY (device_memory.c).
 *
 * torch_npu's allocator works as on a device: aclrtMalloc refuses what does not fit, and so do expandable segments
 * (aclrtMallocPhysical). In a seeded order, memory that the allocator gives out again is filled with NaN in front of its
 * first use, on the stream of that use. A task of another stream that still reads it then computes NaN. Pages that were
 * freed or unmapped are inaccessible: using them ends the process with a message.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 512, HOST = 0, DEVICE = 1, UNREGISTERED = 2, POISON = 0xFF /* NaN in every floating-point format */ };

typedef struct range { /* in a treap: a search tree by address, a heap by weight */
    struct range *left, *right;
    uint64_t weight;
    char *from;
    size_t size;
    int where, device;
    bool fresh;
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *segments, *blocks; /* what aclrtMalloc and its relatives returned; what torch_npu's allocator gave out */
static range *mappings;          /* of aclrtMapMem */
static __thread int32_t current_device;
static int32_t devices;

/* A forked child has a copy of the memory; it is not the device's. */
static void in_child(void) { segments = blocks = mappings = NULL; }

__attribute__((constructor)) static void prepare(void) {
    devices = (int32_t)setting_number("NPU_EMULATOR_DEVICES", 8);
    hold_during_fork(&lock);
    pthread_atfork(NULL, NULL, in_child);
}

/* Whether torch_npu's allocator reports its blocks: the library that it looks for is preloaded (build.py). */
static bool blocks_are_reported(void) { return dlsym(RTLD_DEFAULT, "emulator_memory_tool"); }

int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= devices || device >= DEVICES) {
        set_message("there is no device %d: the emulated machine has %d", device, devices);
        return ACL_ERROR_RT_INVALID_DEVICE;
    }
    if (order_is_seeded() && !blocks_are_reported()) {
        set_message("NPU_EMULATOR_SEED needs libascend_kernel_hook.so in LD_PRELOAD: start the program with torchtitan-npu emulate --seed");
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
    current_device = device;
    return ACL_SUCCESS;
}

int aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return ACL_SUCCESS;
}

/* Ranges */

static range *find(range *root, const void *address) { /* the range that contains the address */
    range *found = NULL;
    for (range *one = root; one; one = (const char *)address < one->from ? one->left : one->right)
        if ((const char *)address >= one->from) found = one;
    return found && (const char *)address < found->from + found->size ? found : NULL;
}

/* Set `low` to the ranges of `root` below the address and `high` to the others. */
static void split(range *root, const char *address, range **low, range **high) {
    if (!root) *low = *high = NULL;
    else if (root->from < address) {
        *low = root;
        split(root->right, address, &root->right, high);
    } else {
        *high = root;
        split(root->left, address, low, &root->left);
    }
}

/* Return the ranges of both; all of `low` are below those of `high`. */
static range *merge(range *low, range *high) {
    if (!low || !high) return low ? low : high;
    if (low->weight > high->weight) {
        low->right = merge(low->right, high);
        return low;
    }
    high->left = merge(low, high->left);
    return high;
}

static range **child(range *of, const void *address) { return (const char *)address < of->from ? &of->left : &of->right; }

static void insert(range **root, range value) {
    range *one = malloc(sizeof *one);
    *one = value;
    one->weight = mix((uintptr_t)one->from, 0);
    while (*root && (*root)->weight >= one->weight) root = child(*root, one->from);
    split(*root, one->from, &one->left, &one->right);
    *root = one;
}

static range *take_out(range **root, const void *from) {
    while (*root && (*root)->from != from) root = child(*root, from);
    range *one = *root;
    if (one) *root = merge(one->left, one->right);
    return one;
}

/* Inaccessible pages. The last ones are remembered, so that a fault in them is explained. */

enum { REMEMBERED = 1024 };
static struct {
    char *from;
    size_t size;
    bool reserved; /* by aclrtReserveMemAddress, which releases them */
} inaccessible[REMEMBERED];
static unsigned next_inaccessible;
static struct sigaction handler_before;

static void explain_fault(int number, siginfo_t *info, void *context) {
    static const char text[] = "emulator: a pointer to device memory was used after aclrtFree or aclrtUnmapMem\n";
    const char *address = info->si_addr;
    for (int i = 0; i < REMEMBERED; i++)
        if (inaccessible[i].from && address >= inaccessible[i].from && address < inaccessible[i].from + inaccessible[i].size) {
            if (write(STDERR_FILENO, text, sizeof text - 1) < 0) break;
            break;
        }
    sigaction(SIGSEGV, &handler_before, NULL); /* the instruction faults again, for the handler before */
}

static void explain_faults(void) {
    struct sigaction handler = {.sa_sigaction = explain_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &handler, &handler_before);
}

/* The lock is held. The pages lose their memory and stay reserved until they are no longer remembered. */
static void make_inaccessible(char *from, size_t size, bool reserved) {
    static bool handled;
    if (!handled) explain_faults();
    handled = true;
    mmap(from, size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned i = next_inaccessible++ % REMEMBERED;
    if (inaccessible[i].from && !inaccessible[i].reserved) munmap(inaccessible[i].from, inaccessible[i].size);
    inaccessible[i].from = from;
    inaccessible[i].size = size;
    inaccessible[i].reserved = reserved;
}

/* The lock is held: these reserved pages are used again, or released. */
static void forget_inaccessible(const char *from, size_t size) {
    for (int i = 0; i < REMEMBERED; i++)
        if (inaccessible[i].reserved && inaccessible[i].from >= from && inaccessible[i].from < from + size) inaccessible[i].from = NULL;
}

/* Allocations */

static int allocate(void **out, size_t size, int where) {
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!size) size = ALIGNMENT;
    int result = where == DEVICE ? charge_device(current_device, size) : ACL_SUCCESS;
    if (result) return result;
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        if (where == DEVICE) discharge_device(current_device, size);
        set_message("the host has no %zu bytes left for the emulated device", size);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    pthread_mutex_lock(&lock);
    insert(&segments, (range){.from = pages, .size = size, .where = where, .device = current_device});
    pthread_mutex_unlock(&lock);
    *out = pages;
    return ACL_SUCCESS;
}

int aclrtSynchronizeDevice(void);
static int deallocate(void *from) {
    aclrtSynchronizeDevice(); /* queued tasks may use it */
    pthread_mutex_lock(&lock);
    range *one = take_out(&segments, from);
    if (one && one->where == DEVICE) make_inaccessible(one->from, one->size, false);
    else if (one) munmap(one->from, one->size);
    pthread_mutex_unlock(&lock);
    if (!one) return ACL_ERROR_RT_PARAM_INVALID;
    if (one->where == DEVICE) discharge_device(one->device, one->size);
    free(one);
    return ACL_SUCCESS;
}

int aclrtMalloc(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocHost(void **out, size_t size) { return allocate(out, size, HOST); }
int aclrtMallocHostWithCfg(void **out, uint64_t size, void *configuration) { return allocate(out, size, HOST); }
int aclrtFree(void *from) { return deallocate(from); }
int aclrtFreeHost(void *from) { return deallocate(from); }

int aclrtGetMemInfo(int attribute, size_t *left, size_t *all) {
    device_memory(current_device, left, all);
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
    pthread_mutex_lock(&lock);
    insert(&segments, (range){.from = from, .size = size, .where = HOST});
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
    pthread_mutex_lock(&lock);
    insert(&segments, (range){.from = pages, .size = size, .where = DEVICE, .device = current_device});
    pthread_mutex_unlock(&lock);
    *out = pages;
    return ACL_SUCCESS;
}

int aclrtReleaseMemAddress(void *from) {
    pthread_mutex_lock(&lock);
    range *one = take_out(&segments, from);
    if (one) forget_inaccessible(one->from, one->size);
    pthread_mutex_unlock(&lock);
    if (!one) return ACL_ERROR_RT_PARAM_INVALID;
    munmap(one->from, one->size);
    free(one);
    return ACL_SUCCESS;
}

int aclrtMallocPhysical(physical **out, size_t size, const void *properties, uint64_t flags) {
    int result = charge_device(current_device, size);
    if (result) return result;
    *out = malloc(sizeof **out);
    **out = (physical){size, current_device};
    return ACL_SUCCESS;
}

int aclrtFreePhysical(physical *one) {
    discharge_device(one->device, one->size);
    free(one);
    return ACL_SUCCESS;
}

int aclrtMapMem(void *from, size_t size, size_t offset, physical *one, uint64_t flags) {
    if (mprotect(from, size, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lock);
    forget_inaccessible(from, size);
    insert(&mappings, (range){.from = from, .size = size});
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

int aclrtUnmapMem(void *from) {
    int result = aclrtSynchronizeDevice(); /* queued tasks may use it */
    pthread_mutex_lock(&lock);
    range *one = take_out(&mappings, from);
    if (one) make_inaccessible(one->from, one->size, true);
    pthread_mutex_unlock(&lock);
    free(one);
    return one ? result : ACL_ERROR_RT_PARAM_INVALID;
}

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
        free(take_out(&blocks, given->ranges[i].from));
        insert(&blocks, (range){.from = given->ranges[i].from, .size = given->ranges[i].size, .fresh = true});
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
    return launch_task(on, &made->head);
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

/* Memory. A device's memory is the host's, counted against NPU_EMULATOR_MEMORY (device_memory.c).
 *
 * torch_npu's allocator works as on a device: aclrtMalloc refuses what does not fit, and so do expandable segments
 * (aclrtMallocPhysical). Pages that were freed or unmapped are inaccessible: using them ends the process with a message.
 */
#define _GNU_SOURCE
#include "memory.h"
#include "device.h"
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 512, HOST = 0, DEVICE = 1, UNREGISTERED = 2 };

typedef struct Range { /* in a treap: a search tree by address, a heap by weight */
    struct Range *left, *right;
    uint64_t weight;
    char *from;
    size_t size;
    int where, device;
    bool fresh;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *segments, *blocks; /* what aclrtMalloc and its relatives returned; what torch_npu's allocator gave out */
static Range *mappings;          /* of aclrtMapMem */

/* A forked child has a copy of the memory; it is not the device's. */
static void in_child(void) { segments = blocks = mappings = NULL; }

__attribute__((constructor)) static void prepare(void) {
    hold_during_fork(&lock);
    pthread_atfork(NULL, NULL, in_child);
}

/* Ranges */

static Range *find(Range *root, const void *address) { /* the range that contains the address */
    Range *found = NULL;
    for (Range *range = root; range; range = (const char *)address < range->from ? range->left : range->right)
        if ((const char *)address >= range->from) found = range;
    return found && (const char *)address < found->from + found->size ? found : NULL;
}

/* Set `low` to the ranges of `root` below the address and `high` to the others. */
static void split(Range *root, const char *address, Range **low, Range **high) {
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
static Range *merge(Range *low, Range *high) {
    if (!low || !high) return low ? low : high;
    if (low->weight > high->weight) {
        low->right = merge(low->right, high);
        return low;
    }
    high->left = merge(low, high->left);
    return high;
}

static Range **child(Range *range, const void *address) { return (const char *)address < range->from ? &range->left : &range->right; }

static void insert(Range **root, Range value) {
    Range *range = malloc(sizeof *range);
    *range = value;
    range->weight = mix((uintptr_t)range->from, 0);
    while (*root && (*root)->weight >= range->weight) root = child(*root, range->from);
    split(*root, range->from, &range->left, &range->right);
    *root = range;
}

static Range *take_out(Range **root, const void *from) {
    while (*root && (*root)->from != from) root = child(*root, from);
    Range *range = *root;
    if (range) *root = merge(range->left, range->right);
    return range;
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

static int current_device(void) {
    int32_t device;
    aclrtGetDevice(&device);
    return device;
}

static int allocate(void **out, size_t size, int where) {
    int device = current_device();
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!size) size = ALIGNMENT;
    int result = where == DEVICE ? charge_device(device, size) : ACL_SUCCESS;
    if (result) return result;
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        if (where == DEVICE) discharge_device(device, size);
        set_message("the host has no %zu bytes left for the emulated device", size);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    pthread_mutex_lock(&lock);
    insert(&segments, (Range){.from = pages, .size = size, .where = where, .device = device});
    pthread_mutex_unlock(&lock);
    *out = pages;
    return ACL_SUCCESS;
}

static int deallocate(void *from) {
    synchronize_all(-1); /* queued tasks may use it */
    pthread_mutex_lock(&lock);
    Range *range = take_out(&segments, from);
    if (range && range->where == DEVICE) make_inaccessible(range->from, range->size, false);
    else if (range) munmap(range->from, range->size);
    pthread_mutex_unlock(&lock);
    if (!range) return ACL_ERROR_RT_PARAM_INVALID;
    if (range->where == DEVICE) discharge_device(range->device, range->size);
    free(range);
    return ACL_SUCCESS;
}

int aclrtMalloc(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocate(out, size, DEVICE); }
int aclrtMallocHost(void **out, size_t size) { return allocate(out, size, HOST); }
int aclrtMallocHostWithCfg(void **out, uint64_t size, void *configuration) { return allocate(out, size, HOST); }
int aclrtFree(void *from) { return deallocate(from); }
int aclrtFreeHost(void *from) { return deallocate(from); }

int aclrtGetMemInfo(int attribute, size_t *left, size_t *all) {
    device_memory(current_device(), left, all);
    return ACL_SUCCESS;
}

typedef struct {
    uint32_t id;
    uint32_t type;
} Location;
typedef struct {
    Location where;
    uint32_t page_size;
    uint32_t reserved[4];
} PointerAttributes;

int aclrtPointerGetAttributes(const void *address, PointerAttributes *out) {
    pthread_mutex_lock(&lock);
    Range *range = find(segments, address);
    *out = (PointerAttributes){.where = {range ? range->device : 0, range ? range->where : UNREGISTERED}};
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Host memory that the program pins itself */

int aclrtHostRegister(void *from, uint64_t size, int type, void **device_address) {
    pthread_mutex_lock(&lock);
    insert(&segments, (Range){.from = from, .size = size, .where = HOST});
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
} PhysicalMemory;

int aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    void *pages = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lock);
    insert(&segments, (Range){.from = pages, .size = size, .where = DEVICE, .device = current_device()});
    pthread_mutex_unlock(&lock);
    *out = pages;
    return ACL_SUCCESS;
}

int aclrtReleaseMemAddress(void *from) {
    pthread_mutex_lock(&lock);
    Range *range = take_out(&segments, from);
    if (range) forget_inaccessible(range->from, range->size);
    pthread_mutex_unlock(&lock);
    if (!range) return ACL_ERROR_RT_PARAM_INVALID;
    munmap(range->from, range->size);
    free(range);
    return ACL_SUCCESS;
}

int aclrtMallocPhysical(PhysicalMemory **out, size_t size, const void *properties, uint64_t flags) {
    int device = current_device(), result = charge_device(device, size);
    if (result) return result;
    *out = malloc(sizeof **out);
    **out = (PhysicalMemory){size, device};
    return ACL_SUCCESS;
}

int aclrtFreePhysical(PhysicalMemory *physical) {
    discharge_device(physical->device, physical->size);
    free(physical);
    return ACL_SUCCESS;
}

int aclrtMapMem(void *from, size_t size, size_t offset, PhysicalMemory *physical, uint64_t flags) {
    if (mprotect(from, size, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lock);
    forget_inaccessible(from, size);
    insert(&mappings, (Range){.from = from, .size = size});
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

int aclrtUnmapMem(void *from) {
    int result = synchronize_all(-1); /* queued tasks may use it */
    pthread_mutex_lock(&lock);
    Range *range = take_out(&mappings, from);
    if (range) make_inaccessible(range->from, range->size, true);
    pthread_mutex_unlock(&lock);
    free(range);
    return range ? result : ACL_ERROR_RT_PARAM_INVALID;
}

/* Blocks of torch_npu's allocator. It reports them through mstx if a memory tool is preloaded; in a seeded order the
 * emulator preloads a library of that tool's name (environment.py). */

typedef struct {
    uint32_t device;
    void *from;
    uint64_t size;
} ReportedRange;
typedef struct {
    void *heap;
    int type;
    size_t count;
    const ReportedRange *ranges;
    void **handles;
} ReportedBlocks;
typedef struct {
    int type;
    void *from;
} BlockReference;
typedef struct {
    size_t count;
    const BlockReference *blocks;
} ReturnedBlocks;

static char domain;
void *mstxDomainCreateA(const char *name) { return &domain; }
void mstxDomainDestroy(void *in_domain) {}
void *mstxMemHeapRegister(void *in_domain, const void *heap) { return &domain; }
void mstxMemHeapUnregister(void *in_domain, void *heap) {}

void mstxMemRegionsRegister(void *in_domain, const ReportedBlocks *given) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < given->count; i++) {
        free(take_out(&blocks, given->ranges[i].from));
        insert(&blocks, (Range){.from = given->ranges[i].from, .size = given->ranges[i].size, .fresh = true});
    }
    pthread_mutex_unlock(&lock);
}

void mstxMemRegionsUnregister(void *in_domain, const ReturnedBlocks *returned) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < returned->count; i++) free(take_out(&blocks, returned->blocks[i].from));
    pthread_mutex_unlock(&lock);
}

/* Find the block that contains the address if this is its first use, and mark it as used. */
bool first_use(const void *address, char **from, size_t *size) {
    pthread_mutex_lock(&lock);
    Range *range = find(blocks, address);
    bool is_first = range && range->fresh;
    if (is_first) {
        range->fresh = false;
        *from = range->from;
        *size = range->size;
    }
    pthread_mutex_unlock(&lock);
    return is_first;
}

bool is_registered(const void *address) {
    pthread_mutex_lock(&lock);
    bool found = find(segments, address);
    pthread_mutex_unlock(&lock);
    return found;
}

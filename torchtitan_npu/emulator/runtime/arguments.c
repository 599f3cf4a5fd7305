/* Arguments of operators: torch_npu describes tensors, scalars and lists by handles that it creates and destroys.
 *
 * Handles are slots of one reserved region, so that any word can be tested for being one: an argument of the wrong kind
 * is then an error and not a crash. A call that is queued holds references of its own.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <string.h>
#include <sys/mman.h>

enum { SLOT = 256, SLOTS = 1 << 22, MAGIC = 0x4e505545 };
_Static_assert(sizeof(tensor) <= SLOT, "a tensor fits a slot");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *region; /* reserved when the library is loaded: read without the lock */
static uint32_t taken;
static void *unused; /* a list through the first word of each free slot */

__attribute__((constructor)) static void prepare(void) {
    region = mmap(NULL, (size_t)SLOT * SLOTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) abort(); /* 1 GiB of addresses */
    hold_during_fork(&lock);
}

static void *take(char kind) {
    pthread_mutex_lock(&lock);
    void *slot = unused;
    if (slot) unused = *(void **)slot;
    else if (taken < SLOTS) slot = region + (size_t)SLOT * taken++;
    pthread_mutex_unlock(&lock);
    if (!slot) abort(); /* four million live handles */
    *(object *)slot = (object){.magic = MAGIC, .references = 1, .kind = kind};
    return slot;
}

char object_kind(const void *pointer) {
    size_t distance = (const char *)pointer - region;
    bool is_slot = distance < (size_t)SLOT * SLOTS && distance % SLOT == 0;
    return is_slot && ((const object *)pointer)->magic == MAGIC ? ((const object *)pointer)->kind : 0;
}

void retain(void *pointer) { __atomic_add_fetch(&((object *)pointer)->references, 1, __ATOMIC_RELAXED); }

void release(void *pointer) {
    object *one = pointer;
    if (__atomic_sub_fetch(&one->references, 1, __ATOMIC_ACQ_REL)) return;
    if (one->kind == 'T' || one->kind == 'S') {
        list *of = pointer;
        for (uint64_t i = 0; i < of->length; i++)
            if (of->items[i]) release(of->items[i]);
        free(of->items);
    } else if (strchr("IFB", one->kind)) free(((array *)pointer)->items);
    one->magic = 0;
    pthread_mutex_lock(&lock);
    *(void **)pointer = unused;
    unused = pointer;
    pthread_mutex_unlock(&lock);
}

static const struct {
    unsigned char size;
    bool floating;
    const char *name;
} DTYPES[] = {[0] = {4, true, "float32"},    [1] = {2, true, "float16"},        [2] = {1, false, "int8"},
              [3] = {4, false, "int32"},     [4] = {1, false, "uint8"},         [6] = {2, false, "int16"},
              [7] = {2, false, "uint16"},    [8] = {4, false, "uint32"},        [9] = {8, false, "int64"},
              [10] = {8, false, "uint64"},   [11] = {8, true, "float64"},       [12] = {1, false, "bool"},
              [16] = {8, true, "complex64"}, [17] = {16, true, "complex128"},   [27] = {2, true, "bfloat16"},
              [33] = {4, true, "complex32"}, [34] = {1, true, "hifloat8"},      [35] = {1, true, "float8_e5m2"},
              [36] = {1, true, "float8_e4m3fn"}, [37] = {1, true, "float8_e8m0fnu"}};
static bool is_known(int dtype) { return dtype >= 0 && dtype < (int)(sizeof DTYPES / sizeof *DTYPES) && DTYPES[dtype].size; }
size_t dtype_size(int dtype) { return is_known(dtype) ? DTYPES[dtype].size : 0; }
bool is_floating(int dtype) { return is_known(dtype) && DTYPES[dtype].floating; }
const char *emulator_dtype_name(int dtype) { return is_known(dtype) ? DTYPES[dtype].name : "unknown"; }

static int destroy(void *pointer) {
    if (pointer) release(pointer);
    return ACL_SUCCESS;
}

tensor *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *stride, int64_t offset, int format,
                        const int64_t *storage_shape, uint64_t storage_rank, void *data) {
    tensor *made = take('t');
    made->dtype = dtype;
    made->format = format;
    made->rank = (int32_t)rank;
    made->offset = offset;
    made->data = data;
    int64_t step = 1;
    for (int i = rank > MOST_DIMENSIONS ? -1 : (int)rank - 1; i >= 0; i--) {
        made->shape[i] = shape[i];
        made->stride[i] = stride ? stride[i] : step;
        step *= shape[i];
    }
    return made;
}

scalar *aclCreateScalar(const void *value, int dtype) {
    scalar *made = take('s');
    made->dtype = dtype;
    memset(made->value, 0, sizeof made->value);
    memcpy(made->value, value, dtype_size(dtype));
    return made;
}

/* A list takes over its items: destroying it destroys them. */
static list *make_list(char kind, object *const *items, uint64_t length) {
    list *made = take(kind);
    made->length = length;
    made->items = malloc(length * sizeof *items + 1);
    if (length) memcpy(made->items, items, length * sizeof *items);
    return made;
}
list *aclCreateTensorList(object *const *items, uint64_t length) { return make_list('T', items, length); }
list *aclCreateScalarList(object *const *items, uint64_t length) { return make_list('S', items, length); }

static array *make_array(char kind, const void *items, uint64_t length, size_t size) {
    array *made = take(kind);
    made->length = length;
    made->items = malloc(length * size + 1);
    if (length) memcpy(made->items, items, length * size);
    return made;
}
array *aclCreateIntArray(const int64_t *items, uint64_t length) { return make_array('I', items, length, 8); }
array *aclCreateFloatArray(const float *items, uint64_t length) { return make_array('F', items, length, 4); }
array *aclCreateBoolArray(const bool *items, uint64_t length) { return make_array('B', items, length, 1); }

int aclDestroyTensor(void *one) { return destroy(one); }
int aclDestroyScalar(void *one) { return destroy(one); }
int aclDestroyTensorList(void *one) { return destroy(one); }
int aclDestroyScalarList(void *one) { return destroy(one); }
int aclDestroyIntArray(void *one) { return destroy(one); }
int aclDestroyFloatArray(void *one) { return destroy(one); }
int aclDestroyBoolArray(void *one) { return destroy(one); }

/* The caller deletes[] the shape. An operator whose output size depends on the data writes it back before. */
int aclGetViewShape(const tensor *of, int64_t **shape, uint64_t *rank) {
    if (of->rank > MOST_DIMENSIONS) return ACLNN_ERR_PARAM_INVALID;
    *rank = of->rank;
    *shape = malloc(sizeof of->shape);
    memcpy(*shape, of->shape, sizeof of->shape);
    return ACL_SUCCESS;
}

int aclGetDataType(const tensor *of, int *dtype) {
    *dtype = of->dtype;
    return ACL_SUCCESS;
}

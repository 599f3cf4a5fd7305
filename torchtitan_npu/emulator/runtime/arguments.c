/* Arguments of operators: torch_npu describes tensors, scalars and lists by handles that it creates and destroys.
 *
 * Handles are slots of one reserved region, so that any word can be tested for being one: an argument of the wrong type
 * is then an error and not a crash. A call that is queued holds references of its own.
 */
#define _GNU_SOURCE
#include "arguments.h"
#include <string.h>
#include <sys/mman.h>

enum { SLOT = 256, SLOTS = 1 << 22, MAGIC = 0x4e505545 };
_Static_assert(sizeof(Tensor) <= SLOT, "a tensor fits a slot");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *region; /* reserved when the library is loaded: read without the lock */
static uint32_t taken;
static void *unused; /* a list through the first word of each free slot */

__attribute__((constructor)) static void prepare(void) {
    region = mmap(NULL, (size_t)SLOT * SLOTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) abort(); /* 1 GiB of addresses */
    hold_during_fork(&lock);
}

static void *take(char type) {
    pthread_mutex_lock(&lock);
    void *slot = unused;
    if (slot) unused = *(void **)slot;
    else if (taken < SLOTS) slot = region + (size_t)SLOT * taken++;
    pthread_mutex_unlock(&lock);
    if (!slot) abort(); /* four million live handles */
    *(Object *)slot = (Object){.magic = MAGIC, .references = 1, .type = type};
    return slot;
}

char object_type(const void *pointer) {
    size_t distance = (const char *)pointer - region;
    bool is_slot = distance < (size_t)SLOT * SLOTS && distance % SLOT == 0;
    return is_slot && ((const Object *)pointer)->magic == MAGIC ? ((const Object *)pointer)->type : 0;
}

void retain(void *pointer) { __atomic_add_fetch(&((Object *)pointer)->references, 1, __ATOMIC_RELAXED); }

void release(void *pointer) {
    Object *object = pointer;
    if (__atomic_sub_fetch(&object->references, 1, __ATOMIC_ACQ_REL)) return;
    if (object->type == 'T' || object->type == 'S') {
        List *list = pointer;
        for (uint64_t i = 0; i < list->length; i++)
            if (list->items[i]) release(list->items[i]);
        free(list->items);
    } else if (strchr("IFB", object->type)) free(((Array *)pointer)->items);
    object->magic = 0;
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

Tensor *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *stride, int64_t offset, int format,
                        const int64_t *storage_shape, uint64_t storage_rank, void *data) {
    Tensor *tensor = take('t');
    tensor->dtype = dtype;
    tensor->format = format;
    tensor->rank = (int32_t)rank;
    tensor->offset = offset;
    tensor->data = data;
    int64_t step = 1;
    for (int i = rank > MOST_DIMENSIONS ? -1 : (int)rank - 1; i >= 0; i--) {
        tensor->shape[i] = shape[i];
        tensor->stride[i] = stride ? stride[i] : step;
        step *= shape[i];
    }
    return tensor;
}

Scalar *aclCreateScalar(const void *value, int dtype) {
    Scalar *scalar = take('s');
    scalar->dtype = dtype;
    memset(scalar->value, 0, sizeof scalar->value);
    memcpy(scalar->value, value, dtype_size(dtype));
    return scalar;
}

/* A list takes over its items: destroying it destroys them. */
static List *make_list(char type, Object *const *items, uint64_t length) {
    List *list = take(type);
    list->length = length;
    list->items = malloc(length * sizeof *items + 1);
    if (length) memcpy(list->items, items, length * sizeof *items);
    return list;
}
List *aclCreateTensorList(Object *const *items, uint64_t length) { return make_list('T', items, length); }
List *aclCreateScalarList(Object *const *items, uint64_t length) { return make_list('S', items, length); }

static Array *make_array(char type, const void *items, uint64_t length, size_t size) {
    Array *array = take(type);
    array->length = length;
    array->items = malloc(length * size + 1);
    if (length) memcpy(array->items, items, length * size);
    return array;
}
Array *aclCreateIntArray(const int64_t *items, uint64_t length) { return make_array('I', items, length, 8); }
Array *aclCreateFloatArray(const float *items, uint64_t length) { return make_array('F', items, length, 4); }
Array *aclCreateBoolArray(const bool *items, uint64_t length) { return make_array('B', items, length, 1); }

int aclDestroyTensor(void *handle) { return destroy(handle); }
int aclDestroyScalar(void *handle) { return destroy(handle); }
int aclDestroyTensorList(void *handle) { return destroy(handle); }
int aclDestroyScalarList(void *handle) { return destroy(handle); }
int aclDestroyIntArray(void *handle) { return destroy(handle); }
int aclDestroyFloatArray(void *handle) { return destroy(handle); }
int aclDestroyBoolArray(void *handle) { return destroy(handle); }

/* The caller deletes[] the shape. An operator whose output size depends on the data writes it back before. */
int aclGetViewShape(const Tensor *tensor, int64_t **shape, uint64_t *rank) {
    if (tensor->rank > MOST_DIMENSIONS) return ACLNN_ERR_PARAM_INVALID;
    *rank = tensor->rank;
    *shape = malloc(sizeof tensor->shape);
    memcpy(*shape, tensor->shape, sizeof tensor->shape);
    return ACL_SUCCESS;
}

int aclGetDataType(const Tensor *tensor, int *dtype) {
    *dtype = tensor->dtype;
    return ACL_SUCCESS;
}

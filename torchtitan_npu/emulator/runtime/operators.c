/* Operators: GetWorkspaceSize checks and keeps the arguments, the launch computes with a Python kernel. */
#define _GNU_SOURCE
#include "operators.h"
#include "device.h"
#include "memory.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char HANDLES[] = "tTsSIFB";
static const PythonSide *python; /* set with release and read with acquire: what it points to is complete then */
static pthread_once_t imported = PTHREAD_ONCE_INIT;

static const PythonSide *python_or_null(void) { return __atomic_load_n(&python, __ATOMIC_ACQUIRE); }

void emulator_set_python_side(const PythonSide *side) { __atomic_store_n(&python, side, __ATOMIC_RELEASE); }

static void import_python_side(void) {
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    int (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    void (*release_state)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    if (!ensure || !run || !release_state) return;
    int state = ensure();
    run("import torchtitan_npu.emulator.kernels; torchtitan_npu.emulator.kernels.install()");
    release_state(state);
}

/* Return the Python side; NULL with a message if there is none. */
static const PythonSide *find_python(const char *name) {
    if (!python_or_null()) { /* while one thread imports, another must not hold the GIL and wait for it */
        void *released = release_gil();
        pthread_once(&imported, import_python_side);
        take_gil(released);
    }
    if (!python_or_null()) set_message("%s: the emulator's kernels could not be imported (torchtitan_npu.emulator.kernels)", name);
    return python_or_null();
}

static void release_call(Task *task) {
    Call *call = (Call *)task;
    for (int i = 0; i < call->count; i++) {
        if (strchr(HANDLES, call->operator->types[i]) && call->arguments[i].pointer) release(call->arguments[i].pointer);
        if (call->operator->types[i] == 'z') free(call->arguments[i].pointer);
    }
    free(call);
}

/* Null kernels: with NPU_EMULATOR_NULL_KERNELS a call whose outputs are floating-point numbers computes nothing. A call
 * whose outputs are integers is computed, so that routing and sizes stay valid, and so is one that turns integers into
 * floating-point numbers or whose output's size depends on the data. */

static bool null_kernels;
__attribute__((constructor)) static void read_settings(void) { null_kernels = setting_number("NPU_EMULATOR_NULL_KERNELS", 0); }

typedef struct {
    int floating, other;
} TensorCount;

static void count_tensor(const Tensor *tensor, TensorCount *count) {
    if (tensor) *(is_floating(tensor->dtype) ? &count->floating : &count->other) += 1;
}

static void count_tensors(char type, const void *pointer, TensorCount *count) {
    if (type == 't') count_tensor(pointer, count);
    if (type == 'T' && pointer)
        for (uint64_t i = 0; i < ((const List *)pointer)->length; i++) count_tensor((const Tensor *)((const List *)pointer)->items[i], count);
}

static bool is_null(const Call *call) {
    TensorCount inputs = {0}, outputs = {0};
    for (int i = 0; i < call->count; i++)
        count_tensors(call->operator->types[i], call->arguments[i].pointer, call->operator->outputs >> i & 1 ? &outputs : &inputs);
    bool from_integers = inputs.other && !inputs.floating;
    return outputs.floating && !outputs.other && !from_integers && strcmp(call->operator->name, "aclnnMaskedSelect");
}

static int run_call(Task *task) { return null_kernels && is_null((Call *)task) ? ACL_SUCCESS : python_or_null()->run((Call *)task); }

/* The length of the name of argument i, and where it begins. */
static int argument_name(const Operator *operator, int i, const char **name) {
    const char *at = operator->arguments;
    while (i--) at = strchr(at, ',') + 1;
    *name = at;
    return (int)strcspn(at, ",");
}

static const char *handle_type(char type) {
    switch (type) {
    case 't': return "aclTensor";
    case 'T': return "aclTensorList";
    case 's': return "aclScalar";
    case 'S': return "aclScalarList";
    case 'I': return "aclIntArray";
    case 'F': return "aclFloatArray";
    case 'B': return "aclBoolArray";
    }
    return "no object of ACL, or one that was destroyed";
}

/* Items of a list have the type of the list's letter in lower case; a missing item is NULL. */
static bool has_items_of_type(char type, const void *pointer) {
    if (!pointer || (type != 'T' && type != 'S')) return true;
    const List *items = pointer;
    for (uint64_t i = 0; i < items->length; i++)
        if (items->items[i] && object_type(items->items[i]) != (type == 'T' ? 't' : 's')) return false;
    return true;
}

static bool has_many_dimensions(char type, const void *pointer) {
    if (!pointer) return false;
    if (type == 't') return ((const Tensor *)pointer)->rank > MOST_DIMENSIONS;
    for (uint64_t i = 0; type == 'T' && i < ((const List *)pointer)->length; i++)
        if (has_many_dimensions('t', ((const List *)pointer)->items[i])) return true;
    return false;
}

static bool has_prototypes_types(const Operator *operator, const Argument *arguments, int count) {
    for (int i = 0; i < count; i++) {
        char type = operator->types[i];
        if (!strchr(HANDLES, type) || !arguments[i].pointer) continue;
        bool is_same = object_type(arguments[i].pointer) == type;
        bool has_items = !is_same || has_items_of_type(type, arguments[i].pointer);
        if (is_same && has_items && !has_many_dimensions(type, arguments[i].pointer)) continue;
        const char *name;
        int length = argument_name(operator, i, &name);
        if (!has_items)
            set_message("%s: argument %d, %.*s, is a list with an item of another type, or one that was destroyed", operator->name, i + 1, length, name);
        else if (is_same)
            set_message("%s: argument %d, %.*s, is a tensor of more than %d dimensions, which no operator of CANN takes", operator->name, i + 1, length,
                        name, MOST_DIMENSIONS);
        else
            set_message("%s: argument %d, %.*s, is %s; its prototype has %s", operator->name, i + 1, length, name,
                        handle_type(object_type(arguments[i].pointer)), handle_type(type));
        return false;
    }
    return true;
}

/* Documented dtypes and ranks: build.py generates the chips, and for each operator a set by series and argument. */
extern const struct {
    const char *name;
    int series;
} chips[];
extern const char cann_version[];

static int series(void) {
    static int known = -1;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found < 0) {
        const char *name = aclrtGetSocName();
        int i = 0;
        while (chips[i].name && strcmp(chips[i].name, name)) i++;
        if (chips[i].name) __atomic_store_n(&known, found = chips[i].series, __ATOMIC_RELAXED);
        else set_message("NPU_EMULATOR_CHIP: %s is no chip of torch_npu; see torchtitan_npu/chips.py", name);
    }
    return found;
}

static bool is_empty(const Tensor *tensor) {
    for (int i = 0; i < tensor->rank; i++)
        if (!tensor->shape[i]) return true;
    return false;
}

static void add_name(char *names, size_t room, const char *name) {
    if (*names) strncat(names, ", ", room - strlen(names) - 1);
    strncat(names, name, room - strlen(names) - 1);
}

/* Say what argument i is, and what the document lists instead. */
static void refuse(const Operator *operator, int i, const char *found, const char *documented) {
    const char *name;
    int length = argument_name(operator, i, &name);
    set_message("%s: %.*s %s; CANN %s on %s takes %s (%s)", operator->name, length, name, found, cann_version, aclrtGetSocName(), documented,
                operator->document);
}

static void refuse_dtype(const Operator *operator, int i, uint64_t allowed, int dtype) {
    char found[64], names[512] = "";
    snprintf(found, sizeof found, "is %s", emulator_dtype_name(dtype));
    for (int each = 0; each < RANK_BIT; each++)
        if (allowed >> each & 1 && dtype_size(each)) add_name(names, sizeof names, emulator_dtype_name(each));
    refuse(operator, i, found, names);
}

static void refuse_rank(const Operator *operator, int i, uint64_t allowed, int rank) {
    char found[64], names[64] = "";
    snprintf(found, sizeof found, "has %d dimension%s", rank, rank == 1 ? "" : "s");
    uint64_t ranks = allowed >> RANK_BIT;
    if (ranks >> 1 & 1) ranks &= ~1ull; /* 0 is taken wherever 1 is documented (tools/emulator_tensors.py) */
    for (int each = 0; each <= MOST_DIMENSIONS; each++)
        if (ranks >> each & 1) add_name(names, sizeof names, (const char[]){'0' + each, 0});
    refuse(operator, i, found, names);
}

static bool is_documented(const Operator *operator, int i, uint64_t allowed, const Tensor *tensor) {
    if (!tensor) return true;
    bool dtype = tensor->dtype < 0 || tensor->dtype >= RANK_BIT || allowed >> tensor->dtype & 1;
    bool rank = allowed >> (RANK_BIT + tensor->rank) & 1;
    if ((dtype && rank) || is_empty(tensor)) return true; /* an empty tensor is an argument that is left out */
    if (!dtype) refuse_dtype(operator, i, allowed, tensor->dtype);
    else refuse_rank(operator, i, allowed, tensor->rank);
    return false;
}

static bool has_documented_tensors(const Operator *operator, const Argument *arguments, int count) {
    if (series() < 0) return false;
    if (!operator->allowed) return true;
    const uint64_t *allowed = operator->allowed + series() * count;
    for (int i = 0; i < count; i++) {
        if (operator->types[i] == 't' && !is_documented(operator, i, allowed[i], arguments[i].pointer)) return false;
        if (operator->types[i] != 'T' || !arguments[i].pointer) continue;
        const List *list = arguments[i].pointer;
        for (uint64_t k = 0; k < list->length; k++)
            if (!is_documented(operator, i, allowed[i], (const Tensor *)list->items[k])) return false;
    }
    return true;
}

static int check_arguments(const PythonSide *side, Call *call, uint64_t *workspace) {
    const void *check = side->find_check(call->operator);
    if (!check || is_accepted(call, check, workspace)) return ACL_SUCCESS;
    int result = side->check(call, workspace);
    if (!result) accept_call(call, check, *workspace);
    return result;
}

/* Calls that were prepared and not yet launched. If torch_npu cannot allocate the workspace of a call it drops the call
 * without a word. It launches the calls of a thread on a device in the order in which they were prepared, also through its
 * task queue. So a launch shows that the earlier ones were dropped. With a queue for each stream the order is another one:
 * dropped calls are kept then. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Call *last_prepared;
static bool launched_in_order;

__attribute__((constructor)) static void prepare(void) {
    launched_in_order = !setting_number("PER_STREAM_QUEUE", 0);
    hold_during_fork(&lock);
}

static void add_prepared(Call *call) {
    call->thread = pthread_self();
    aclrtGetDevice(&call->device);
    pthread_mutex_lock(&lock);
    call->earlier = last_prepared;
    call->later = NULL;
    if (last_prepared) last_prepared->later = call;
    last_prepared = call;
    pthread_mutex_unlock(&lock);
}

uint64_t emulator_prepared_calls(void) {
    uint64_t count = 0;
    pthread_mutex_lock(&lock);
    for (const Call *call = last_prepared; call; call = call->earlier) count++;
    pthread_mutex_unlock(&lock);
    return count;
}

/* The lock is held. */
static void remove_prepared(Call *call) {
    if (call->earlier) call->earlier->later = call->later;
    *(call->later ? &call->later->earlier : &last_prepared) = call->earlier;
}

/* Take the call out of the list, and the dropped ones before it. Return these, linked by `earlier`. */
static Call *take_prepared(Call *call) {
    Call *dropped = NULL;
    pthread_mutex_lock(&lock);
    for (Call *before = call->earlier, *next; before && launched_in_order; before = next) {
        next = before->earlier;
        if (!pthread_equal(before->thread, call->thread) || before->device != call->device) continue;
        remove_prepared(before);
        before->earlier = dropped;
        dropped = before;
    }
    remove_prepared(call);
    pthread_mutex_unlock(&lock);
    return dropped;
}

int emulator_prepare_call(Operator *operator, const Argument *arguments, int count, uint64_t *workspace, void **executor) {
    const PythonSide *side = find_python(operator->name);
    if (!side) return ACLNN_ERR_INNER;
    if (!has_prototypes_types(operator, arguments, count)) return ACLNN_ERR_PARAM_INVALID;
    if (!has_documented_tensors(operator, arguments, count)) return ACLNN_ERR_PARAM_INVALID;
    Call *call = malloc(sizeof *call + count * sizeof *arguments);
    call->head = (Task){.step = run_call, .release = release_call, .name = operator->name, .category = OPERATOR};
    call->operator = operator;
    call->count = count;
    memcpy(call->arguments, arguments, count * sizeof *arguments);
    *workspace = 0;
    int result = check_arguments(side, call, workspace);
    if (result) {
        free(call);
        return result;
    }
    for (int i = 0; i < count; i++) { /* the caller frees its arguments before a queued call runs */
        if (strchr(HANDLES, operator->types[i]) && arguments[i].pointer) retain(arguments[i].pointer);
        if (operator->types[i] == 'z' && arguments[i].pointer) call->arguments[i].pointer = strdup(arguments[i].pointer);
    }
    add_prepared(call);
    *executor = call;
    return ACL_SUCCESS;
}

static void poison_fresh_tensors(const Call *call, Stream *stream) {
    for (int i = 0; i < call->count; i++) {
        void *pointer = call->arguments[i].pointer;
        if (!pointer) continue;
        if (call->operator->types[i] == 't') poison_if_fresh(((Tensor *)pointer)->data, stream);
        if (call->operator->types[i] == 'T')
            for (uint64_t k = 0; k < ((List *)pointer)->length; k++) {
                Tensor *item = (Tensor *)((List *)pointer)->items[k];
                if (item) poison_if_fresh(item->data, stream);
            }
    }
}

int emulator_launch_call(void *executor, void *stream) {
    for (Call *dropped = take_prepared(executor), *next; dropped; dropped = next) {
        next = dropped->earlier;
        release_call(&dropped->head);
    }
    if (poisons_memory()) poison_fresh_tensors(executor, stream);
    return launch_task(stream, executor);
}

/* Older operators, by name and attributes, are not emulated. Their arguments are accepted, so that the error names the
 * operator. */
static char old_argument;
void *aclCreateTensorDesc(int dtype, int rank, const int64_t *shape, int format) { return &old_argument; }
void *aclCreateDataBuffer(void *data, size_t size) { return &old_argument; }
void *aclopCreateAttr(void) { return &old_argument; }
void aclDestroyTensorDesc(const void *description) {}
int aclDestroyDataBuffer(const void *buffer) { return ACL_SUCCESS; }
void aclopDestroyAttr(const void *attributes) {}
void aclSetTensorDescName(void *description, const char *name) {}
int aclSetTensorFormat(void *description, int format) { return ACL_SUCCESS; }
int aclSetTensorPlaceMent(void *description, int placement) { return ACL_SUCCESS; }
int aclSetTensorShape(void *description, int rank, const int64_t *shape) { return ACL_SUCCESS; }
int aclopSetAttrBool(void *attributes, const char *name, uint8_t value) { return ACL_SUCCESS; }
int aclopSetAttrDataType(void *attributes, const char *name, int value) { return ACL_SUCCESS; }
int aclopSetAttrFloat(void *attributes, const char *name, float value) { return ACL_SUCCESS; }
int aclopSetAttrInt(void *attributes, const char *name, int64_t value) { return ACL_SUCCESS; }
int aclopSetAttrString(void *attributes, const char *name, const char *value) { return ACL_SUCCESS; }
int aclopSetAttrListBool(void *attributes, const char *name, int count, const uint8_t *values) { return ACL_SUCCESS; }
int aclopSetAttrListFloat(void *attributes, const char *name, int count, const float *values) { return ACL_SUCCESS; }
int aclopSetAttrListInt(void *attributes, const char *name, int count, const int64_t *values) { return ACL_SUCCESS; }
int aclopSetAttrListListInt(void *attributes, const char *name, int lists, const int *counts, const int64_t *const values[]) {
    return ACL_SUCCESS;
}

int aclopCompileAndExecute(const char *type, int inputs, void **descriptions, void **buffers, int outputs, void **out_descriptions,
                           void **out_buffers, void *attributes, int engine, int flags, const char *path, void *stream) {
    set_message("%s is an operator of the old interface (aclop), which the emulator does not have", type);
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

int rtKernelLaunch(void) {
    set_message("the emulator cannot run device code");
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

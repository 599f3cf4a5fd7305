/* Operators: GetWorkspaceSize checks and keeps the arguments, the launch computes with a Python kernel. */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char HANDLES[] = "tTsSIFB";
static const python_side *python; /* set with release and read with acquire: what it points to is complete then */
static pthread_once_t imported = PTHREAD_ONCE_INIT;

static const python_side *python_or_null(void) { return __atomic_load_n(&python, __ATOMIC_ACQUIRE); }

void emulator_set_python_side(const python_side *side) { __atomic_store_n(&python, side, __ATOMIC_RELEASE); }

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
static const python_side *find_python(const char *name) {
    if (!python_or_null()) { /* while one thread imports, another must not hold the GIL and wait for it */
        void *released = release_gil();
        pthread_once(&imported, import_python_side);
        take_gil(released);
    }
    if (!python_or_null()) set_message("%s: the emulator's kernels could not be imported (torchtitan_npu.emulator.kernels)", name);
    return python_or_null();
}

static void release_call(task *one) {
    call *made = (call *)one;
    for (int i = 0; i < made->count; i++) {
        if (strchr(HANDLES, made->which->kinds[i]) && made->arguments[i].pointer) release(made->arguments[i].pointer);
        if (made->which->kinds[i] == 'z') free(made->arguments[i].pointer);
    }
    free(made);
}

/* Null kernels: with NPU_EMULATOR_NULL_KERNELS a call whose outputs are floating-point numbers computes nothing. A call
 * whose outputs are integers is computed, so that routing and sizes stay valid, and so is one that turns integers into
 * floating-point numbers or whose output's size depends on the data. */

static bool null_kernels;
__attribute__((constructor)) static void read_settings(void) { null_kernels = setting_number("NPU_EMULATOR_NULL_KERNELS", 0); }

typedef struct {
    int floating, other;
} tensor_count;

static void count_tensor(const tensor *one, tensor_count *count) {
    if (one) *(is_floating(one->dtype) ? &count->floating : &count->other) += 1;
}

static void count_tensors(char kind, const void *pointer, tensor_count *count) {
    if (kind == 't') count_tensor(pointer, count);
    if (kind == 'T' && pointer)
        for (uint64_t i = 0; i < ((const list *)pointer)->length; i++) count_tensor((const tensor *)((const list *)pointer)->items[i], count);
}

static bool is_null(const call *of) {
    tensor_count inputs = {0}, outputs = {0};
    for (int i = 0; i < of->count; i++)
        count_tensors(of->which->kinds[i], of->arguments[i].pointer, of->which->outputs >> i & 1 ? &outputs : &inputs);
    bool from_integers = inputs.other && !inputs.floating;
    return outputs.floating && !outputs.other && !from_integers && strcmp(of->which->name, "aclnnMaskedSelect");
}

static int run_call(task *one) { return null_kernels && is_null((call *)one) ? ACL_SUCCESS : python_or_null()->run((call *)one); }

/* The length of the name of argument i, and where it begins. */
static int argument_name(const operator *of, int i, const char **name) {
    const char *at = of->arguments;
    while (i--) at = strchr(at, ',') + 1;
    *name = at;
    return (int)strcspn(at, ",");
}

static const char *handle_type(char kind) {
    switch (kind) {
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
static bool has_items_of_type(char kind, const void *pointer) {
    if (!pointer || (kind != 'T' && kind != 'S')) return true;
    const list *items = pointer;
    for (uint64_t i = 0; i < items->length; i++)
        if (items->items[i] && object_kind(items->items[i]) != (kind == 'T' ? 't' : 's')) return false;
    return true;
}

static bool has_many_dimensions(char kind, const void *pointer) {
    if (!pointer) return false;
    if (kind == 't') return ((const tensor *)pointer)->rank > MOST_DIMENSIONS;
    for (uint64_t i = 0; kind == 'T' && i < ((const list *)pointer)->length; i++)
        if (has_many_dimensions('t', ((const list *)pointer)->items[i])) return true;
    return false;
}

static bool has_prototypes_types(const operator *which, const argument *arguments, int count) {
    for (int i = 0; i < count; i++) {
        char kind = which->kinds[i];
        if (!strchr(HANDLES, kind) || !arguments[i].pointer) continue;
        bool is_same = object_kind(arguments[i].pointer) == kind;
        bool has_items = !is_same || has_items_of_type(kind, arguments[i].pointer);
        if (is_same && has_items && !has_many_dimensions(kind, arguments[i].pointer)) continue;
        const char *name;
        int length = argument_name(which, i, &name);
        if (!has_items)
            set_message("%s: argument %d, %.*s, is a list with an item of another type, or one that was destroyed", which->name, i + 1, length, name);
        else if (is_same)
            set_message("%s: argument %d, %.*s, is a tensor of more than %d dimensions, which no operator of CANN takes", which->name, i + 1, length,
                        name, MOST_DIMENSIONS);
        else
            set_message("%s: argument %d, %.*s, is %s; its prototype has %s", which->name, i + 1, length, name,
                        handle_type(object_kind(arguments[i].pointer)), handle_type(kind));
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

static bool is_empty(const tensor *one) {
    for (int i = 0; i < one->rank; i++)
        if (!one->shape[i]) return true;
    return false;
}

static void add_name(char *names, size_t room, const char *name) {
    if (*names) strncat(names, ", ", room - strlen(names) - 1);
    strncat(names, name, room - strlen(names) - 1);
}

/* Say what argument i is, and what the document lists instead. */
static void refuse(const operator *which, int i, const char *found, const char *documented) {
    const char *name;
    int length = argument_name(which, i, &name);
    set_message("%s: %.*s %s; CANN %s on %s takes %s (%s)", which->name, length, name, found, cann_version, aclrtGetSocName(), documented,
                which->document);
}

static void refuse_dtype(const operator *which, int i, uint64_t allowed, int dtype) {
    char found[64], names[512] = "";
    snprintf(found, sizeof found, "is %s", emulator_dtype_name(dtype));
    for (int each = 0; each < RANK_BIT; each++)
        if (allowed >> each & 1 && dtype_size(each)) add_name(names, sizeof names, emulator_dtype_name(each));
    refuse(which, i, found, names);
}

static void refuse_rank(const operator *which, int i, uint64_t allowed, int rank) {
    char found[64], names[64] = "";
    snprintf(found, sizeof found, "has %d dimension%s", rank, rank == 1 ? "" : "s");
    for (int each = 0; each <= MOST_DIMENSIONS; each++)
        if (allowed >> (RANK_BIT + each) & 1) add_name(names, sizeof names, (const char[]){'0' + each, 0});
    refuse(which, i, found, names);
}

static bool is_documented(const operator *which, int i, uint64_t allowed, const tensor *one) {
    if (!one) return true;
    bool dtype = one->dtype < 0 || one->dtype >= RANK_BIT || allowed >> one->dtype & 1;
    bool rank = allowed >> (RANK_BIT + one->rank) & 1;
    if ((dtype && rank) || is_empty(one)) return true; /* an empty tensor is an argument that is left out */
    if (!dtype) refuse_dtype(which, i, allowed, one->dtype);
    else refuse_rank(which, i, allowed, one->rank);
    return false;
}

static bool has_documented_tensors(const operator *which, const argument *arguments, int count) {
    if (series() < 0) return false;
    if (!which->allowed) return true;
    const uint64_t *allowed = which->allowed + series() * count;
    for (int i = 0; i < count; i++) {
        if (which->kinds[i] == 't' && !is_documented(which, i, allowed[i], arguments[i].pointer)) return false;
        if (which->kinds[i] != 'T' || !arguments[i].pointer) continue;
        const list *of = arguments[i].pointer;
        for (uint64_t k = 0; k < of->length; k++)
            if (!is_documented(which, i, allowed[i], (const tensor *)of->items[k])) return false;
    }
    return true;
}

static int check_arguments(const python_side *side, call *made, uint64_t *workspace) {
    const void *check = side->find_check(made->which);
    if (!check || is_accepted(made, check, workspace)) return ACL_SUCCESS;
    int result = side->check(made, workspace);
    if (!result) accept_call(made, check, *workspace);
    return result;
}

int emulator_prepare_call(operator *which, const argument *arguments, int count, uint64_t *workspace, void **executor) {
    const python_side *side = find_python(which->name);
    if (!side) return ACLNN_ERR_INNER;
    if (!has_prototypes_types(which, arguments, count) || !has_documented_tensors(which, arguments, count)) return ACLNN_ERR_PARAM_INVALID;
    call *made = malloc(sizeof *made + count * sizeof *arguments);
    made->head = (task){.step = run_call, .release = release_call, .name = which->name, .category = OPERATOR};
    made->which = which;
    made->count = count;
    memcpy(made->arguments, arguments, count * sizeof *arguments);
    *workspace = 0;
    int result = check_arguments(side, made, workspace);
    if (result) {
        free(made);
        return result;
    }
    for (int i = 0; i < count; i++) { /* the caller frees its arguments before a queued call runs */
        if (strchr(HANDLES, which->kinds[i]) && arguments[i].pointer) retain(arguments[i].pointer);
        if (which->kinds[i] == 'z' && arguments[i].pointer) made->arguments[i].pointer = strdup(arguments[i].pointer);
    }
    *executor = made;
    return ACL_SUCCESS;
}

static void poison_fresh_tensors(const call *of, stream *on) {
    for (int i = 0; i < of->count; i++) {
        void *pointer = of->arguments[i].pointer;
        if (!pointer) continue;
        if (of->which->kinds[i] == 't') poison_if_fresh(((tensor *)pointer)->data, on);
        if (of->which->kinds[i] == 'T')
            for (uint64_t k = 0; k < ((list *)pointer)->length; k++) {
                tensor *item = (tensor *)((list *)pointer)->items[k];
                if (item) poison_if_fresh(item->data, on);
            }
    }
}

int emulator_launch_call(void *executor, void *on) {
    if (order_is_seeded()) poison_fresh_tensors(executor, on);
    return launch_task(on, executor);
}

/* Older operators, by name and attributes, are not emulated. */
int aclopCompileAndExecute(const char *type, int inputs, void **descriptions, void **buffers, int outputs, void **out_descriptions,
                           void **out_buffers, void *attributes, int engine, int flags, const char *path, void *on) {
    set_message("%s is an operator of the old interface (aclop), which the emulator does not have", type);
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

int rtKernelLaunch(void) {
    set_message("the emulator cannot run device code");
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

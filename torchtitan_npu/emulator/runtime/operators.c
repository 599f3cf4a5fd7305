/* Operators: GetWorkspaceSize checks and keeps the arguments, the launch computes with a Python kernel. */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char HANDLES[] = "tTsSIFB";
static python_side python;
static pthread_once_t imported = PTHREAD_ONCE_INIT;

void set_python_side(const python_side *side) { python = *side; }

static void import_python_side(void) {
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    int (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    void (*release_state)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    if (!ensure || !run || !release_state) return;
    int state = ensure();
    run("import torchtitan_npu.emulator.kernels");
    release_state(state);
}

static bool is_ready(const char *name) {
    if (!python.run) { /* not pthread_once: while one thread imports, it must not hold the GIL and wait for another */
        void *released = release_gil();
        pthread_once(&imported, import_python_side);
        take_gil(released);
    }
    if (!python.run) set_message("%s: the emulator's kernels could not be imported (torchtitan_npu.emulator.kernels)", name);
    return python.run;
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

static int run_call(task *one) { return null_kernels && is_null((call *)one) ? ACL_SUCCESS : python.run((call *)one); }

int operator_prepare(const operator *which, const argument *arguments, int count, uint64_t *workspace, void **executor) {
    if (!is_ready(which->name)) return ACLNN_ERR_INNER;
    for (int i = 0; i < count; i++) {
        char kind = which->kinds[i];
        if (!strchr(HANDLES, kind) || !arguments[i].pointer || is_object(arguments[i].pointer, kind)) continue;
        set_message("%s: argument %d is not of the kind '%c' that its prototype has (%s)", which->name, i, kind, which->kinds);
        return ACLNN_ERR_PARAM_INVALID;
    }
    call *made = calloc(1, sizeof *made + count * sizeof *arguments);
    made->head = (task){.step = run_call, .release = release_call, .name = which->name, .category = OPERATOR};
    made->which = which;
    made->count = count;
    memcpy(made->arguments, arguments, count * sizeof *arguments);
    *workspace = 0;
    *executor = made;
    if (python.has_check(which)) {
        int result = python.check(made, workspace);
        if (result) {
            free(made);
            return result;
        }
    }
    for (int i = 0; i < count; i++) { /* the caller frees its arguments before a queued call runs */
        if (strchr(HANDLES, which->kinds[i]) && arguments[i].pointer) retain(arguments[i].pointer);
        if (which->kinds[i] == 'z' && arguments[i].pointer) made->arguments[i].pointer = strdup(arguments[i].pointer);
    }
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

int operator_launch(void *executor, void *on) {
    if (order_is_seeded()) poison_fresh_tensors(executor, on);
    return launch(on, executor);
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

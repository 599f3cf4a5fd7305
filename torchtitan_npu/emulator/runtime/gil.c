/* The GIL, without linking to Python: the emulator also loads in programs without it. */
#define _GNU_SOURCE
#include "base.h"
#include <dlfcn.h>

static int (*is_initialized)(void);
static int (*holds_gil)(void);
static void *(*save_thread)(void);
static void (*restore_thread)(void *);
static pthread_once_t python_found = PTHREAD_ONCE_INIT;

static void find_python(void) {
    is_initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    holds_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    save_thread = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    restore_thread = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}

void *release_gil(void) {
    pthread_once(&python_found, find_python);
    bool is_found = is_initialized && holds_gil && save_thread && restore_thread;
    return is_found && is_initialized() && holds_gil() ? save_thread() : NULL;
}

void take_gil(void *released) {
    if (released) restore_thread(released);
}

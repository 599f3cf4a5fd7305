/* Functions of CANN that torch_npu links to and that the emulator does not have. build.py generates one for each such
 * symbol; calling it is an error that names it. Functions without an effect on results are defined instead, in device.c
 * and operators.c. */
#include "base.h"
#include <stdio.h>

/* Called by the generated functions (build.py), which declare these two themselves. */
__attribute__((visibility("hidden"))) int refuse_unknown_function(const char *name, bool *printed) {
    set_message("%s is a function of CANN that the emulator does not have", name);
    /* torch_npu ignores the result of some functions, and the message of others */
    if (!__atomic_exchange_n(printed, true, __ATOMIC_RELAXED)) fprintf(stderr, "emulator: %s\n", message());
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

__attribute__((visibility("hidden"))) void abort_in_unknown_function(const char *name) {
    bool printed = false;
    refuse_unknown_function(name, &printed);
    abort();
}

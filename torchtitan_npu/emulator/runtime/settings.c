/* Settings of the emulator come from the environment; `torchtitan-npu emulate` sets them. */
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

long long setting_number(const char *name, long long otherwise) {
    const char *value = setting(name, NULL);
    return value ? atoll(value) : otherwise;
}

static __thread char text[16384];

void set_message(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
}

const char *message(void) { return text; }

/* A message is returned once: a later error has its own. */
const char *aclGetRecentErrMsg(void) {
    static __thread char returned[sizeof text];
    strcpy(returned, *text ? text : "the emulator has no message");
    *text = 0;
    return returned;
}

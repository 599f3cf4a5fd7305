/* Settings, messages and time. Settings come from the environment; `torchtitan-npu emulate` sets them. */
#include "base.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

long long setting_number(const char *name, long long otherwise) {
    const char *value = setting(name, NULL);
    return value ? atoll(value) : otherwise;
}

double microseconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

/* The finalizer of SplitMix64. */
uint64_t mix(uint64_t value, uint64_t salt) {
    value += (salt + 1) * 0x9E3779B97F4A7C15ull;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ value >> 27) * 0x94D049BB133111EBull;
    return value ^ value >> 31;
}

static __thread char text[16384];

void set_message(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
}

void emulator_set_message(const char *given) { set_message("%s", given); }

const char *message(void) { return text; }

/* A message is returned once: a later error has its own. */
const char *aclGetRecentErrMsg(void) {
    static __thread char returned[sizeof text];
    strcpy(returned, *text ? text : "the emulator has no message");
    *text = 0;
    return returned;
}

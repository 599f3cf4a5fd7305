/* The functions of Huawei's libc_sec that torch_npu links to: like their namesakes of C, with the size of the destination.
 * A result that does not fit is an error, and leaves an empty string or the part that fits. */
#include "base.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TRUNCATED = -1, ERANGE_AND_RESET = ERANGE | 128 };

int strcpy_s(char *to, size_t room, const char *from) {
    if (!to || !room) return to ? ERANGE : EINVAL;
    size_t length = from ? strlen(from) : 0;
    if (!from || length >= room) {
        *to = 0;
        return from ? ERANGE_AND_RESET : EINVAL | 128;
    }
    memmove(to, from, length + 1);
    return 0;
}

/* Write at most `most` characters and a 0. Return their number; -1 if more were to be written. */
int vsnprintf_s(char *to, size_t room, size_t most, const char *format, va_list values) {
    if (!to || !room || !format) return TRUNCATED;
    size_t size = most < room ? most + 1 : room;
    int length = vsnprintf(to, size, format, values);
    if (length < 0) *to = 0;
    return length < 0 || (size_t)length >= size ? TRUNCATED : length;
}

int snprintf_s(char *to, size_t room, size_t most, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int length = vsnprintf_s(to, room, most, format, values);
    va_end(values);
    return length;
}

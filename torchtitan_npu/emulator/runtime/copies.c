/* Copies and fills. A synchronous one is not ordered with any stream.
 *
 * In a seeded order, memory that torch_npu's allocator gives out again is filled with NaN in front of its first use, on the
 * stream of that use. A task of another stream that still reads it then computes NaN.
 */
#include "memory.h"
#include <string.h>

enum { POISON = 0xFF /* NaN in every floating-point format */ };

static void poison_at_once(const void *address) {
    char *from;
    size_t size;
    if (first_use(address, &from, &size)) memset(from, POISON, size);
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int direction) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    int refused = refuse_synchronization("aclrtMemcpy");
    if (refused) return refused;
    poison_at_once(to);
    memmove(to, from, size);
    return ACL_SUCCESS;
}

static const char POISONING[] = "poison";

typedef struct {
    Task head;
    char *to;
    const char *from; /* NULL: fill with value */
    size_t size;
    int value;
} Copy;

static int copy_or_fill(Task *task) {
    Copy *what = (Copy *)task;
    if (what->from) memmove(what->to, what->from, what->size);
    else memset(what->to, what->value, what->size);
    return ACL_SUCCESS;
}

static int launch_copy(Stream *stream, const char *name, void *to, const void *from, size_t size, int value) {
    Copy *copy = calloc(1, sizeof *copy);
    copy->head = (Task){.step = copy_or_fill, .name = name, .bytes = from ? 2 * size : size};
    copy->head.category = name == POISONING ? CONTROL : COPY; /* poisoning is the emulator's own */
    copy->to = to;
    copy->from = from;
    copy->size = size;
    copy->value = value;
    return launch_task(stream, &copy->head);
}

void poison_if_fresh(const void *address, Stream *stream) {
    char *from;
    size_t size;
    /* a graph would poison its memory in every replay, also inputs that were written before */
    if (first_use(address, &from, &size) && !is_captured(capture_of(stream))) launch_copy(stream, POISONING, from, NULL, size, POISON);
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int direction, Stream *stream) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    poison_if_fresh(to, stream);
    poison_if_fresh(from, stream);
    return launch_copy(stream, "copy", to, from, size, 0);
}

int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int direction, Stream *stream) {
    int result = aclrtMemcpyAsync(to, room, from, size, direction, stream);
    /* CANN returns after the copy if one side is host memory that is not pinned: the caller may free it then */
    return result || (is_registered(to) && is_registered(from)) ? result : aclrtSynchronizeStream(stream);
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    poison_at_once(to);
    memset(to, value, size);
    return ACL_SUCCESS;
}

int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, Stream *stream) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    poison_if_fresh(to, stream);
    return launch_copy(stream, "fill", to, NULL, size, value);
}

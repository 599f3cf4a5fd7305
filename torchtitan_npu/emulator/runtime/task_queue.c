/* A library of its own, preloaded if torch_npu uses its task queue (environment.py).
 *
 * A thread of torch_npu launches what is queued, and the emulator needs the GIL for it. A thread that waits until the
 * queue is empty may hold the GIL: torch_npu 2.13.0 releases it only if the program has used an operator of the old
 * interface. Both would wait forever. torch_npu waits in eventfd_read, so this one releases the GIL meanwhile.
 */
#include "base.h"
#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

EXPORTED const char emulator_task_queue = 1; /* device.c tests for it */

EXPORTED int eventfd_read(int file, eventfd_t *value) {
    void *released = release_gil();
    int result = read(file, value, sizeof *value) == sizeof *value ? 0 : -1;
    int error = errno;
    take_gil(released);
    errno = error;
    return result;
}

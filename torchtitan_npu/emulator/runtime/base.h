/* What every file of the runtime uses. Each .c file begins with what it emulates, and declares what others use in a header
 * of its name. A file uses those above it in this list, never those below (tests/emulator/test_runtime.py):
 *
 *   settings fork gil                                     environment, messages, time; locks in a forked child; Python's GIL
 *   unknown_functions secure_functions profiler device    functions without state, and what torch_npu asks when it starts
 *   device_memory arguments                               bytes in use; handles of tensors, scalars and lists
 *   accepted_calls recorder                               arguments that a check has accepted; a record of every task
 *   captures streams events graphs                        tasks kept in a graph; queues of tasks; what orders them; replays
 *   allocator copies operators                            memory; what moves it; calls that Python computes
 *   reduction communicator hccl                           collectives between processes
 *   bridge task_queue                                     libraries beside this one: the Python module; a preloaded one
 *
 * Besides CANN's functions the library exports those that libopapi.so, _bridge.so and Python call: emulator_… . All others
 * are hidden: a preloaded library could otherwise interpose them, and this one those of others if it is preloaded.
 */
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" /* functions have CANN's parameters */
#pragma GCC visibility push(hidden)
#define EXPORTED __attribute__((visibility("default")))

/* Result codes of ACL that torch_npu tests for or prints. */
enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_INVALID_DEVICE = 107001,
    ACL_ERROR_RT_CAPTURE_DEPENDENCY = 107024,
    ACL_ERROR_RT_STREAM_UNJOINED = 107025,
    ACL_ERROR_RT_STREAM_CAPTURED = 107027,
    ACL_ERROR_RT_EVENT_CAPTURED = 107028,
    ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029,
    ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT = 107030,
    ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036,
    ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD = 107038,
    ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046,
    ACL_ERROR_RT_TASK_TIMEOUT = 507048,
    ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED = 507903,
    ACL_ERROR_RT_AICORE_EXCEPTION = 507015,
    ACLNN_ERR_PARAM_INVALID = 161002,
    ACLNN_ERR_INNER = 561000,
};

/* settings.c. Environment variables that a launch needs are read once, when the library is loaded. */
const char *setting(const char *name, const char *otherwise);
long long setting_number(const char *name, long long otherwise);
uint64_t mix(uint64_t value, uint64_t salt); /* pseudo-random bits that depend on both */
double microseconds_now(void);               /* of CLOCK_MONOTONIC, which all processes of a host share */

/* The message of the last error of this thread, which aclGetRecentErrMsg returns (settings.c). */
void set_message(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *message(void);
EXPORTED void emulator_set_message(const char *text);

void hold_during_fork(pthread_mutex_t *lock); /* fork.c */

/* Release the GIL if this thread holds it, before it blocks; a kernel on another thread may need it (gil.c). */
void *release_gil(void);
void take_gil(void *released);
#pragma GCC visibility pop

/* Streams: queues of tasks (streams.c). NULL is the default stream. */
#pragma once
#include "captures.h"

#pragma GCC visibility push(hidden)
typedef struct Stream Stream;
int launch_task(Stream *stream, Task *task);
EXPORTED int aclrtSynchronizeStream(Stream *stream);
int synchronize_all(int32_t timeout_ms); /* aclrtSynchronizeDevice, also during a capture */
int wait_until(const uint64_t *counter, uint64_t value, int timeout_ms); /* help to run what is queued until the counter has the value */
void progress_of_a_query(void);          /* a query was answered with "not ready" */
bool poisons_memory(void); /* the process was started in a seeded order (copies.c) */
Capture *capture_of(Stream *stream);
int failure_of(const Stream *stream, const char **text); /* the code of its first failed task, and the message */
EXPORTED const char *emulator_finish_queue(void); /* before the interpreter ends; return a message if a task failed */
EXPORTED void emulator_set_seed(uint64_t value);  /* 0: the usual order */
#pragma GCC visibility pop

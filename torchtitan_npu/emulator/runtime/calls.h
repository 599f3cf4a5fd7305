/* Tasks, and the calls of operators among them. */
#pragma once
#include "arguments.h"

#pragma GCC visibility push(hidden)
/* A task is tried until its step does not answer PENDING. */
enum { PENDING = -1 };
typedef struct Task {
    struct Task *next;
    int (*step)(struct Task *);     /* ACL_SUCCESS, PENDING or an error code */
    void (*release)(struct Task *); /* frees the task; NULL stands for free() */
    const char *name;
    uint64_t order; /* in which tasks were launched, over all streams */
    int stream;     /* the number of the stream on which it was launched */
    enum { CONTROL, COPY, OPERATOR, COLLECTIVE, REPLAY } category;
    bool for_others; /* a thread or process that does not call the emulator may wait for it */
    uint64_t bytes;  /* that a copy or collective moves */
    double launched, began; /* in microseconds; this and what follows only if a recorder is on */
    uint64_t training_step; /* in which it was launched */
} Task;

static inline void free_task(Task *task) {
    if (task->release) task->release(task);
    else free(task);
}

enum { RANK_BIT = 48 }; /* see build.py */

/* The table of operators and the functions that call emulator_prepare_call are generated (build.py). */
typedef union {
    void *pointer;
    double real;
    float single;
    int64_t integer;
} Argument;
typedef struct {
    const char *name;
    const char *types;     /* one letter an argument, see C_TYPES in build.py */
    const char *arguments; /* their names, "self,other,alpha,out" */
    uint64_t outputs;      /* bit i: argument i is written */
    const uint64_t *allowed; /* by series and argument; bit i: CANN takes dtype i, bit RANK_BIT + i: i dimensions. NULL: no document */
    const char *document;
    void *python_name;     /* the name as a Python object, made by bridge.c */
} Operator;
typedef struct Call {
    Task head;
    Operator *operator;
    struct Call *earlier, *later; /* prepared and not yet launched, like this one */
    pthread_t thread;             /* that prepared the call, and its device then */
    int32_t device;
    int count;
    Argument arguments[];
} Call;

/* Arguments that a check has accepted (accepted_calls.c). `check` identifies the check. */
bool is_accepted(const Call *call, const void *check, uint64_t *workspace);
void accept_call(const Call *call, const void *check, uint64_t workspace);
#pragma GCC visibility pop

/* Shared declarations of the CANN emulator. Each .c file begins with what it emulates.
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

enum { DEVICES = 64, MOST_DIMENSIONS = 8, RANK_BIT = 48 }; /* RANK_BIT: see build.py */

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

EXPORTED const char *aclrtGetSocName(void); /* the chip (device.c) */

/* Environment variables (settings.c). Those that a launch needs are read once, when the library is loaded. */
const char *setting(const char *name, const char *otherwise);
long long setting_number(const char *name, long long otherwise);

uint64_t mix(uint64_t value, uint64_t salt); /* pseudo-random bits that depend on both (settings.c) */

void hold_during_fork(pthread_mutex_t *lock); /* fork.c */

/* A function of CANN that the emulator does not have was called (unknown_functions.c). Print that once and return an error
 * code. A function that returns no code ends the process. build.py generates the callers. */
int refuse_unknown_function(const char *name, bool *printed);
void abort_in_unknown_function(const char *name);

/* The message of the last error of this thread, which aclGetRecentErrMsg returns. */
void set_message(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *message(void);
EXPORTED void emulator_set_message(const char *text);

/* Streams (streams.c). A task is tried until its step does not answer PENDING. */
enum { PENDING = -1 };
typedef struct Stream Stream;
typedef struct Task {
    struct Task *next;
    int (*step)(struct Task *);     /* ACL_SUCCESS, PENDING or an error code */
    void (*release)(struct Task *); /* frees the task; NULL stands for free() */
    const char *name;
    uint64_t order; /* in which tasks were launched, over all streams */
    Stream *stream;
    enum { CONTROL, COPY, OPERATOR, COLLECTIVE, REPLAY } category;
    uint64_t bytes; /* that a copy or collective moves */
    double launched, began;  /* in microseconds; this and what follows only if a recorder is on */
    uint64_t training_step;  /* in which it was launched */
} Task;
int launch_task(Stream *stream, Task *task);
void free_task(Task *task);
int synchronize_all(int32_t timeout_ms); /* aclrtSynchronizeDevice, also during a capture */
bool order_is_seeded(void);
EXPORTED int emulator_stream_id(const Stream *stream);
EXPORTED const char *emulator_finish_queue(void); /* before the interpreter ends; return a message if a task failed */

/* Graphs (graphs.c). Tasks of a captured stream are kept in a graph and run when it is replayed. */
typedef struct Graph Graph;
Graph *graph_of(const Stream *stream); /* that the stream is captured into, or NULL (this and the next two: streams.c) */
void add_to_graph(Stream *stream, Graph *graph);
const Stream *end_capture(const Graph *graph); /* return a stream whose tasks no other stream has waited for, or NULL */
Graph *hold_graph_of(const Stream *stream); /* graph_of, and keep it until drop_graph: another thread may end the capture */
Graph *join_capture(uint64_t id, Stream *stream); /* add the stream and hold the graph; NULL: it has ended, or the stream has another */
void drop_graph(Graph *graph);
/* Both drop the graph. */
int capture_task(Graph *graph, Task *task);
int refuse_for_graph(Graph *graph, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
int refuse_for_capture(uint64_t id, int code, const char *text); /* also if it has ended */
int refuse_synchronization(const char *name); /* an error code if this thread may not wait for the device now */
uint64_t id_of(const Graph *graph);
uint64_t next_position(Graph *graph); /* of a task or wait in the graph */
bool is_origin(const Graph *graph, const Stream *stream); /* the capture began on this stream */

/* Records (recorder.c). */
extern bool recording;
void record_launch(Task *task);
int recorded_step(Task *task);         /* run the step and record the task when it has ended */
EXPORTED void emulator_mark_step(void); /* a training step has ended */

/* Release the GIL if this thread holds it, before it blocks; a kernel on another thread may need it. */
void *release_gil(void);
void take_gil(void *released);

/* Memory (device_memory.c, memory.c). */
int charge_device(int device, size_t bytes); /* an error code if the device has not as many left */
void discharge_device(int device, size_t bytes);
void device_memory(int device, size_t *left, size_t *all);
void poison_if_fresh(const void *address, Stream *stream);

/* Arguments of operators (arguments.c): what aclCreateTensor and its relatives return. */
typedef struct {
    uint32_t magic;
    int32_t references;
    char type; /* 't' tensor, 's' scalar, 'T' and 'S' lists of them, 'I' 'F' 'B' arrays of int64, float, bool */
} Object;
typedef struct {
    Object head;
    int32_t dtype, format;
    int32_t rank;   /* if it is above MOST_DIMENSIONS, no operator takes the tensor */
    int64_t offset; /* in elements */
    void *data;
    int64_t shape[MOST_DIMENSIONS], stride[MOST_DIMENSIONS];
} Tensor;
typedef struct {
    Object head;
    int32_t dtype;
    unsigned char value[16];
} Scalar;
typedef struct {
    Object head;
    uint64_t length;
    Object **items;
} List;
typedef struct {
    Object head;
    uint64_t length;
    void *items;
} Array;
enum { ACL_FLOAT = 0, ACL_FLOAT16 = 1, ACL_INT32 = 3, ACL_INT64 = 9, ACL_DOUBLE = 11, ACL_BOOL = 12, ACL_BF16 = 27 }; /* some of aclDataType */
size_t dtype_size(int dtype); /* 0: unknown */
EXPORTED const char *emulator_dtype_name(int dtype);
bool is_floating(int dtype);
char object_type(const void *pointer); /* 0: the pointer is no live object */
void retain(void *pointer);
void release(void *pointer);

/* Operators (operators.c). The table and the functions that call emulator_prepare_call are generated (build.py). */
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
EXPORTED int emulator_prepare_call(Operator *operator, const Argument *arguments, int count, uint64_t *workspace, void **executor);
EXPORTED int emulator_launch_call(void *executor, void *stream);
EXPORTED uint64_t emulator_prepared_calls(void); /* calls that were prepared and neither launched nor freed; for tests */

/* Arguments that a check has accepted (accepted_calls.c). `check` identifies the check. */
bool is_accepted(const Call *call, const void *check, uint64_t *workspace);
void accept_call(const Call *call, const void *check, uint64_t workspace);

/* The Python side (bridge.c) sets these when it is imported. */
typedef struct {
    int (*run)(Call *);                            /* compute; an error code */
    const void *(*find_check)(Operator *operator); /* NULL: the operator has no check */
    int (*check)(Call *, uint64_t *workspace);     /* refuse arguments, state the workspace */
} PythonSide;
EXPORTED void emulator_set_python_side(const PythonSide *side);

#pragma GCC visibility pop

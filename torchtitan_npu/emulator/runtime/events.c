/* Events, and host functions on a stream. */
#include "streams.h"

/* One record of an event on a stream. Whoever waits for it holds it, so that recording the event again, on any stream,
 * changes nothing for them. */
typedef struct {
    int references;
    uint64_t done; /* 1 when its stream has reached it */
    double at;     /* in microseconds */
    int error;     /* of the stream that reached it: whoever waits for a failed task fails */
    const char *message;
    uint64_t capture; /* the graph that it is part of, or 0; what follows is its position there */
    Capture *stream;
    uint64_t position;
} Record;

typedef struct {
    Record *latest; /* NULL before the first record */
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the latest records of all events */

__attribute__((constructor)) static void prepare(void) { hold_during_fork(&lock); }

static void drop_record(Record *record) {
    if (record && __atomic_sub_fetch(&record->references, 1, __ATOMIC_ACQ_REL) == 0) free(record);
}

static Record *hold_latest(Event *event) {
    pthread_mutex_lock(&lock);
    Record *record = event->latest;
    if (record) __atomic_add_fetch(&record->references, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return record;
}

int aclrtCreateEvent(Event **out) {
    *out = calloc(1, sizeof **out);
    return ACL_SUCCESS;
}
int aclrtCreateEventWithFlag(Event **out, uint32_t flags) { return aclrtCreateEvent(out); }
int aclrtCreateEventExWithFlag(Event **out, uint32_t flags) { return aclrtCreateEvent(out); }

int aclrtDestroyEvent(Event *event) {
    drop_record(event->latest);
    free(event);
    return ACL_SUCCESS;
}

typedef struct {
    Task head;
    Record *record;
    Stream *stream;
} RecordTask;

static void release_record_task(Task *task) {
    drop_record(((RecordTask *)task)->record);
    free(task);
}

static int reach(Task *task) {
    Record *record = ((RecordTask *)task)->record;
    record->at = microseconds_now();
    record->error = failure_of(((RecordTask *)task)->stream, &record->message);
    __atomic_store_n(&record->done, 1, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static bool is_reached(const Record *record) { return !record || __atomic_load_n(&record->done, __ATOMIC_ACQUIRE); }

static int record_error(const Record *record) {
    if (record && record->error) set_message("%s", record->message);
    return record ? record->error : ACL_SUCCESS;
}

static int wait_for_record(Task *task) {
    Record *record = ((RecordTask *)task)->record;
    return is_reached(record) ? record_error(record) : PENDING;
}

/* The task takes over the reference to the record. */
static int launch_record_task(Record *record, Stream *stream, const char *name, int (*step)(Task *)) {
    RecordTask *task = calloc(1, sizeof *task);
    task->head = (Task){.step = step, .release = release_record_task, .name = name};
    task->record = record;
    task->stream = stream;
    return launch_task(stream, &task->head);
}

int aclrtRecordEvent(Event *event, Stream *stream) {
    Record *record = calloc(1, sizeof *record);
    Graph *graph = hold_graph_of(capture_of(stream));
    if (graph) { /* the tasks of a graph are replayed in the order of their capture: an event adds nothing to it */
        record->capture = id_of(graph);
        record->stream = capture_of(stream);
        record->position = record->stream->last;
        record->done = 1;
    }
    record->references = graph ? 1 : 2; /* of the event and of the task */
    pthread_mutex_lock(&lock);
    Record *before = event->latest;
    event->latest = record;
    pthread_mutex_unlock(&lock);
    drop_record(before);
    if (!graph) return launch_record_task(record, stream, "record event", reach);
    drop_graph(graph);
    return ACL_SUCCESS;
}

/* Make the stream part of the capture to which the record of an event belongs. */
static int join_capture_of(Record record, Capture *stream) {
    Graph *graph = join_capture(record.capture, stream);
    if (!graph) {
        set_message("stream %d waits for an event that was recorded in the capture of another graph", stream->stream);
        return ACL_ERROR_RT_EVENT_CAPTURED;
    }
    if (record.stream != stream && record.position > record.stream->joined) { /* now this stream has to be joined */
        record.stream->joined = record.position;
        if (!is_origin(graph, record.stream)) stream->last = next_position(graph);
    }
    drop_graph(graph);
    return ACL_SUCCESS;
}

/* The wait is for the last record before it. An event that was never recorded is no reason to wait. */
int aclrtStreamWaitEvent(Stream *stream, Event *event) {
    Record *latest = hold_latest(event);
    Capture *capture = capture_of(stream);
    if (latest && latest->capture) {
        int result = join_capture_of(*latest, capture);
        drop_record(latest);
        return result;
    }
    Graph *graph = hold_graph_of(capture);
    if (!graph) return launch_record_task(latest, stream, "wait for event", wait_for_record);
    bool is_recorded = latest;
    drop_record(latest);
    if (is_recorded)
        return refuse_for_graph(graph, ACL_ERROR_RT_CAPTURE_DEPENDENCY, "captured stream %d waits for an event that was recorded outside the capture",
                                capture->stream);
    drop_graph(graph);
    return ACL_SUCCESS;
}
int aclrtResetEvent(Event *event, Stream *stream) { return ACL_SUCCESS; }

/* An error code if the event was recorded in a capture: its state is unknown to the host. */
static int refuse_captured(const Record *latest) {
    if (!latest || !latest->capture) return ACL_SUCCESS;
    return refuse_for_capture(latest->capture, ACL_ERROR_RT_EVENT_CAPTURED, "an event was recorded in the capture of a graph: the host cannot wait for it");
}

int aclrtSynchronizeEvent(Event *event) {
    Record *latest = hold_latest(event);
    int refused = refuse_captured(latest);
    if (refused) {
        drop_record(latest);
        return refused;
    }
    int result = latest ? wait_until(&latest->done, 1, -1) : ACL_SUCCESS;
    if (!result) result = record_error(latest);
    drop_record(latest);
    return result;
}

enum { EVENT_NOT_READY = 0, EVENT_COMPLETE = 1 };
int aclrtQueryEventStatus(Event *event, int *status) {
    Record *latest = hold_latest(event);
    int refused = refuse_captured(latest);
    *status = is_reached(latest) ? EVENT_COMPLETE : EVENT_NOT_READY;
    drop_record(latest);
    if (refused) return refused;
    if (*status == EVENT_NOT_READY) progress_of_a_query();
    return ACL_SUCCESS;
}

int aclrtQueryEventWaitStatus(Event *event, int *status) {
    *status = 0; /* complete */
    return ACL_SUCCESS;
}

/* Return the time when the event was reached, 0 if it was not. */
static double time_of(Event *event) {
    Record *latest = hold_latest(event);
    double at = latest && is_reached(latest) ? latest->at : 0;
    drop_record(latest);
    return at;
}

int aclrtEventElapsedTime(float *out, Event *from, Event *to) {
    double began = time_of(from), ended = time_of(to);
    if (!began || !ended) {
        set_message("the time between two events is known when both were recorded and reached");
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    *out = (float)((ended - began) * 1e-3);
    return ACL_SUCCESS;
}

int aclrtEventGetTimestamp(Event *event, uint64_t *microseconds) {
    *microseconds = (uint64_t)time_of(event);
    return *microseconds ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

/* Host functions on a stream */

typedef struct {
    Task head;
    void (*function)(void *);
    void *data;
} HostTask;

static int call_host(Task *task) {
    HostTask *host = (HostTask *)task;
    host->function(host->data);
    return ACL_SUCCESS;
}

int aclrtLaunchHostFunc(Stream *stream, void (*function)(void *), void *data) {
    HostTask *task = calloc(1, sizeof *task);
    task->head = (Task){.step = call_host, .name = "host function", .for_others = true};
    task->function = function;
    task->data = data;
    return launch_task(stream, &task->head);
}

int aclrtLaunchCallback(void (*function)(void *), void *data, int blocking, Stream *stream) {
    return aclrtLaunchHostFunc(stream, function, data);
}

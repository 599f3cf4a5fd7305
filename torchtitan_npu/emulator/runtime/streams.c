/* Streams and events.
 *
 * A stream is a queue of tasks. A task on an idle stream runs at once, in the thread that launches it: that is fast,
 * and an error has the traceback of its cause. A task that has to wait (for an event, for other ranks), and every task
 * behind it, is queued; the device thread runs queued tasks, and so does any thread that synchronises.
 *
 * With NPU_EMULATOR_SEED set, every task is queued and none runs before a thread synchronises. Which stream goes on then
 * depends on the seed, on the streams and on how far they are, but not on time: a stream has a priority that lasts for
 * several tasks. So tasks that no event orders change places under some seeds, and a missing wait gives a wrong number then.
 *
 * Other processes may wait for a collective, and other threads for a host function, without calling the emulator. If such
 * a task is queued and nothing was called for a while, the device thread runs the queue. Time has an influence there, and
 * where a stream waits for another rank.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct Stream {
    Stream *next;
    Task *first, *last;
    uint64_t launched, done;
    uint64_t done_before_seed; /* tasks that had ended when the seed was set */
    int id, error;
    const Task *running_task; /* a thread runs it */
    char *message;
    Graph *graph; /* that it is captured into; what follows is of this capture */
    uint64_t captured; /* position of its last task in the graph */
    uint64_t joined;   /* its tasks up to this position are before a task of another stream */
};

/* One record of an event on a stream. Whoever waits for it holds it, so that recording the event again, on any stream,
 * changes nothing for them. */
typedef struct {
    int references;
    uint64_t done; /* 1 when its stream has reached it */
    struct timespec at;
    int error; /* of the stream that reached it: whoever waits for a failed task fails */
    const char *message;
    uint64_t capture; /* the graph that it is part of, or 0; what follows is its place there */
    Stream *stream;
    uint64_t position;
} Record;

typedef struct {
    Record *latest; /* NULL before the first record */
} Event;

enum { IDLE_BEFORE_DEVICE_THREAD_MS = 20, POLL_US = 50, LONGEST_POLL_US = 1000, TASKS_PER_PRIORITY = 8 };
enum { QUERIES_PER_TASK = 4, QUERIES_OF_AN_OBSERVER = 1000, LONGEST_WAIT_AT_EXIT_MS = 500 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work;    /* a task was queued; the device thread waits for it */
static pthread_cond_t changed; /* a task has ended; threads that wait for one are counted in `sleepers` */
static pthread_once_t started = PTHREAD_ONCE_INIT;
static Stream *streams, default_stream;
static uint64_t launches, seed, seeds_set;
static int stream_count, queued, queued_for_others, sleepers;
static bool running; /* a thread runs a task of a seeded order */
static const char *last_failure; /* the message of a queued task */
static struct timespec last_call;

__attribute__((constructor)) static void read_settings(void) { seed = (uint64_t)setting_number("NPU_EMULATOR_SEED", 0); }

bool order_is_seeded(void) { return __atomic_load_n(&seed, __ATOMIC_RELAXED) != 0; }
int emulator_stream_id(const Stream *stream) { return stream ? stream->id : 0; }

/* The lock is held. A larger number goes first: the task that was launched first, or what the seed says. */
static uint64_t priority_of(const Stream *stream) {
    if (!seed) return UINT64_MAX - stream->first->order;
    uint64_t of_stream = mix(seed, (uint64_t)stream->id), tasks = stream->done - stream->done_before_seed + of_stream % TASKS_PER_PRIORITY;
    return mix(of_stream, tasks / TASKS_PER_PRIORITY);
}

static struct timespec now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time;
}

static double milliseconds(struct timespec from, struct timespec to) {
    return (to.tv_sec - from.tv_sec) * 1e3 + (to.tv_nsec - from.tv_nsec) * 1e-6;
}

static void wait_for_change(long microseconds) {
    struct timespec until = now();
    until.tv_nsec += microseconds * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    sleepers++;
    pthread_cond_timedwait(&changed, &lock, &until);
    sleepers--;
}

/* Wait until a pending task is worth another try. The longer nothing has happened, the rarer the tries: a rank that waits
 * for others leaves them the processor, and notices them with a delay that is small beside its wait. */
static void wait_to_poll(struct timespec progress) {
    double interval = milliseconds(progress, now()) * 1e3 / 8;
    wait_for_change(interval < POLL_US ? POLL_US : interval > LONGEST_POLL_US ? LONGEST_POLL_US : (long)interval);
}

/* The lock is held: this task of the stream has ended. */
static void finish(Stream *stream, int result) {
    stream->done++;
    if (result && !stream->error) {
        stream->error = result;
        stream->message = strdup(message());
        last_failure = stream->message;
    }
    if (sleepers) pthread_cond_broadcast(&changed); /* a system call: not for every launch */
}

void free_task(Task *task) {
    if (task->release) task->release(task);
    else free(task);
}

static int call_host(Task *task);
static bool is_for_others(const Task *task) { return task->category == COLLECTIVE || task->step == call_host; }

/* The lock is held: try the first task of the stream. Return whether it ended. */
static bool try_first(Stream *stream) {
    Task *task = stream->first;
    stream->running_task = task;
    running = true;
    pthread_mutex_unlock(&lock);
    int result = recording ? recorded_step(task) : task->step(task);
    pthread_mutex_lock(&lock);
    running = false;
    stream->running_task = NULL;
    if (result == PENDING) return false;
    stream->first = task->next;
    if (!stream->first) stream->last = NULL;
    queued--;
    queued_for_others -= is_for_others(task);
    finish(stream, result);
    pthread_mutex_unlock(&lock);
    free_task(task);
    pthread_mutex_lock(&lock);
    return true;
}

/* The lock is held: run one queued task, the first launched one or the one that the seed chooses. */
static bool run_one(void) {
    if (seed && running) return false; /* one after the other: the order is that of the seed */
    uint64_t below = UINT64_MAX;       /* streams with a higher priority were tried, and their first task is pending */
    for (;;) {
        Stream *best = NULL;
        uint64_t highest = 0;
        for (Stream *stream = streams; stream; stream = stream->next) {
            if (!stream->first || stream->running_task) continue;
            uint64_t priority = priority_of(stream);
            if (priority < below && priority >= highest) {
                best = stream;
                highest = priority;
            }
        }
        if (!best) return false;
        below = highest;
        if (try_first(best)) return true;
    }
}

static void *device_thread(void *unused) {
    struct timespec progress = now();
    pthread_mutex_lock(&lock);
    for (;;) {
        if (!(seed ? queued_for_others : queued)) {
            pthread_cond_wait(&work, &lock);
            progress = now();
        } else if (seed && milliseconds(last_call, now()) < IDLE_BEFORE_DEVICE_THREAD_MS) wait_for_change(1000);
        else if (run_one()) progress = now();
        else wait_to_poll(progress);
    }
    return NULL;
}

static void start(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_cond_init(&work, &attributes);
    streams = &default_stream;
    pthread_t thread;
    pthread_create(&thread, NULL, device_thread, NULL);
    pthread_detach(thread);
}

/* A forked child has no device thread, and the tasks belong to the parent. */
static void in_child(void) {
    if (!streams) return;
    for (Stream *stream = streams; stream; stream = stream->next) {
        stream->first = stream->last = NULL;
        stream->running_task = NULL;
        stream->done = stream->launched;
    }
    queued = queued_for_others = sleepers = 0;
    running = false;
    Stream *inherited = streams;
    start();
    streams = inherited;
}

__attribute__((constructor)) static void prepare(void) {
    hold_during_fork(&lock);
    pthread_atfork(NULL, NULL, in_child);
}

/* Change the seed of a process that runs in a seeded order (seeds.py). */
EXPORTED void emulator_set_seed(uint64_t value) {
    synchronize_all(-1);
    pthread_mutex_lock(&lock);
    __atomic_store_n(&seed, value, __ATOMIC_RELAXED);
    seeds_set++;
    for (Stream *stream = streams; stream; stream = stream->next) stream->done_before_seed = stream->done;
    pthread_mutex_unlock(&lock);
}

static __thread bool has_launched; /* this thread */

int launch_task(Stream *stream, Task *task) {
    pthread_once(&started, start);
    if (!stream) stream = &default_stream;
    has_launched = true;
    task->next = NULL;
    task->stream = stream;
    Graph *graph = hold_graph_of(stream);
    if (graph) {
        stream->captured = next_position(graph);
        return capture_task(graph, task);
    }
    if (recording) record_launch(task);
    pthread_mutex_lock(&lock);
    task->order = ++launches;
    stream->launched++;
    if (!seed && !stream->first && !stream->running_task) {
        stream->running_task = task;
        pthread_mutex_unlock(&lock);
        int result = recording ? recorded_step(task) : task->step(task);
        pthread_mutex_lock(&lock);
        stream->running_task = NULL;
        if (result != PENDING) {
            finish(stream, ACL_SUCCESS); /* the caller has the error */
            pthread_mutex_unlock(&lock);
            free_task(task);
            return result;
        }
        task->next = stream->first; /* in front of what other threads have queued meanwhile */
        stream->first = task;
        if (!stream->last) stream->last = task;
    } else {
        if (stream->last) stream->last->next = task;
        else stream->first = task;
        stream->last = task;
    }
    queued++;
    queued_for_others += is_for_others(task);
    if (seed) last_call = now();
    if (!seed || queued_for_others == 1) pthread_cond_signal(&work);
    if (sleepers) pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Block until `counter` reaches `value`; help to run what is queued. */
static int wait_until(const uint64_t *counter, uint64_t value, int timeout_ms) {
    pthread_once(&started, start);
    void *released = release_gil();
    struct timespec began = now(), progress = began;
    int result = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) {
        if (timeout_ms >= 0 && milliseconds(began, now()) > timeout_ms) {
            result = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
            break;
        }
        last_call = now();
        if (run_one()) progress = now();
        else wait_to_poll(progress);
    }
    pthread_mutex_unlock(&lock);
    take_gil(released);
    return result;
}

static int error_of(Stream *stream) {
    pthread_mutex_lock(&lock);
    int error = stream->error;
    if (error) set_message("%s", stream->message);
    pthread_mutex_unlock(&lock);
    return error;
}

static int synchronize(Stream *stream, int32_t timeout_ms) {
    pthread_mutex_lock(&lock);
    uint64_t launched = stream->launched;
    pthread_mutex_unlock(&lock);
    int result = wait_until(&stream->done, launched, timeout_ms);
    return result ? result : error_of(stream);
}

int aclrtSynchronizeStreamWithTimeout(Stream *stream, int32_t timeout_ms) {
    if (!stream) stream = &default_stream;
    Graph *graph = hold_graph_of(stream);
    if (graph)
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: the host cannot wait for it", stream->id);
    return synchronize(stream, timeout_ms);
}

/* Streams are added in front of the list and stay: behind its head, the list is constant. */
static Stream *first_stream(void) {
    pthread_once(&started, start);
    pthread_mutex_lock(&lock);
    Stream *first = streams;
    pthread_mutex_unlock(&lock);
    return first;
}

int aclrtSynchronizeStream(Stream *stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

int synchronize_all(int32_t timeout_ms) {
    int first = ACL_SUCCESS;
    for (Stream *stream = first_stream(); stream; stream = stream->next) { /* all of them: the caller may free what they use */
        int result = synchronize(stream, timeout_ms);
        if (!first) first = result;
    }
    return first;
}

int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    int refused = refuse_synchronization("aclrtSynchronizeDevice");
    return refused ? refused : synchronize_all(timeout_ms);
}

int aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

/* The lock is held: count the tasks that have ended. A kernel or copy that another thread computes will end: set `computes`. */
static uint64_t count_done(bool *computes) {
    uint64_t done = 0;
    *computes = false;
    for (Stream *stream = streams; stream; stream = stream->next) {
        const Task *task = stream->running_task;
        *computes |= task && (task->category == OPERATOR || task->category == COPY || task->category == REPLAY);
        done += stream->done;
    }
    return done;
}

/* A queued call needs the interpreter. What waits for other ranks is given up: they may have ended. */
const char *emulator_finish_queue(void) {
    struct timespec progress = now();
    bool computes;
    pthread_mutex_lock(&lock);
    last_failure = NULL; /* earlier ones were returned to those who synchronised */
    uint64_t done_before = count_done(&computes);
    while (queued && milliseconds(progress, now()) < LONGEST_WAIT_AT_EXIT_MS) {
        if (!run_one()) wait_to_poll(progress);
        uint64_t done = count_done(&computes);
        if (computes || done != done_before) progress = now();
        done_before = done;
    }
    const char *failed = last_failure;
    if (queued) fprintf(stderr, "emulator: the program has ended; tasks that wait for other ranks or threads are given up: %d\n", queued);
    pthread_mutex_unlock(&lock);
    return failed;
}

/* Streams */

int aclrtCreateStreamWithConfig(Stream **out, uint32_t priority, uint32_t flags) {
    pthread_once(&started, start);
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->id = ++stream_count;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *out = stream;
    return ACL_SUCCESS;
}

int aclrtCreateStream(Stream **out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

/* A destroyed stream stays in the list: its tasks still run, and a handle that is used afterwards does not crash. */
int aclrtDestroyStream(Stream *stream) { return ACL_SUCCESS; }
int aclrtDestroyStreamForce(Stream *stream) { return ACL_SUCCESS; }

int aclrtStreamGetId(Stream *stream, int32_t *id) {
    *id = emulator_stream_id(stream);
    return ACL_SUCCESS;
}

/* In a seeded order nothing runs before a thread synchronises. Some queries run a task, so that a loop of them ends. A
 * thread that only observes, such as torch_npu's watchdog, asks at intervals of time: its queries count much less. */
static void progress_of_a_query(void) {
    static __thread uint64_t queries, of_seed;
    pthread_mutex_lock(&lock);
    if (seed) {
        if (of_seed != seeds_set) queries = 0;
        of_seed = seeds_set;
        queries++;
        bool runs = has_launched ? mix(seed, queries) % QUERIES_PER_TASK == 0 : queries % QUERIES_OF_AN_OBSERVER == 0;
        if (runs) run_one();
        if (has_launched) last_call = now();
    }
    pthread_mutex_unlock(&lock);
}

enum { STREAM_COMPLETE = 0, STREAM_NOT_READY = 1 };
int aclrtStreamQuery(Stream *stream, int *status) {
    if (!stream) stream = &default_stream;
    pthread_mutex_lock(&lock);
    *status = stream->done == stream->launched ? STREAM_COMPLETE : STREAM_NOT_READY;
    pthread_mutex_unlock(&lock);
    if (*status == STREAM_NOT_READY) progress_of_a_query();
    return ACL_SUCCESS;
}

/* Captured streams (graphs.c) */

Graph *graph_of(const Stream *stream) { return __atomic_load_n(&(stream ? stream : &default_stream)->graph, __ATOMIC_ACQUIRE); }

void add_to_graph(Stream *stream, Graph *graph) {
    if (!stream) stream = &default_stream;
    if (stream->graph != graph) stream->captured = stream->joined = 0;
    __atomic_store_n(&stream->graph, graph, __ATOMIC_RELEASE);
}

const Stream *end_capture(const Graph *graph) {
    const Stream *unjoined = NULL;
    for (Stream *stream = first_stream(); stream; stream = stream->next) {
        if (graph_of(stream) != graph) continue;
        if (!is_origin(graph, stream) && stream->captured > stream->joined) unjoined = stream;
        add_to_graph(stream, NULL);
    }
    return unjoined;
}

/* Events */

static void drop(Record *record) {
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
    drop(event->latest);
    free(event);
    return ACL_SUCCESS;
}

typedef struct {
    Task head;
    Record *record;
} RecordTask;

static void release_record_task(Task *task) {
    drop(((RecordTask *)task)->record);
    free(task);
}

static int reach(Task *task) {
    Record *record = ((RecordTask *)task)->record;
    record->at = now();
    record->error = task->stream->error;
    record->message = task->stream->message;
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
    return launch_task(stream, &task->head);
}

int aclrtRecordEvent(Event *event, Stream *stream) {
    Record *record = calloc(1, sizeof *record);
    Graph *graph = hold_graph_of(stream);
    if (graph) { /* the tasks of a graph are replayed in the order of their capture: an event adds nothing to it */
        record->capture = id_of(graph);
        record->stream = stream ? stream : &default_stream;
        record->position = record->stream->captured;
        record->done = 1;
    }
    record->references = graph ? 1 : 2; /* of the event and of the task */
    pthread_mutex_lock(&lock);
    Record *before = event->latest;
    event->latest = record;
    pthread_mutex_unlock(&lock);
    drop(before);
    if (!graph) return launch_record_task(record, stream, "record event", reach);
    drop_graph(graph);
    return ACL_SUCCESS;
}

/* The wait is for the last record before it. An event that was never recorded is no reason to wait. */
int aclrtStreamWaitEvent(Stream *stream, Event *event) {
    Record *latest = hold_latest(event);
    bool is_recorded = latest;
    Record place = latest ? *latest : (Record){0};
    drop(latest);
    if (place.capture) { /* the stream becomes part of the capture */
        if (!stream) stream = &default_stream;
        Graph *of_event = join_capture(place.capture, stream);
        if (of_event) {
            if (place.stream != stream && place.position > place.stream->joined) { /* now this stream has to be joined */
                place.stream->joined = place.position;
                if (!is_origin(of_event, place.stream)) stream->captured = next_position(of_event);
            }
            drop_graph(of_event);
            return ACL_SUCCESS;
        }
        set_message("stream %d waits for an event that was recorded in the capture of another graph", emulator_stream_id(stream));
        return ACL_ERROR_RT_EVENT_CAPTURED;
    }
    Graph *graph = hold_graph_of(stream);
    if (graph && is_recorded)
        return refuse_for_graph(graph, ACL_ERROR_RT_CAPTURE_DEPENDENCY, "captured stream %d waits for an event that was recorded outside the capture",
                                emulator_stream_id(stream));
    if (graph) {
        drop_graph(graph);
        return ACL_SUCCESS;
    }
    return launch_record_task(hold_latest(event), stream, "wait for event", wait_for_record);
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
        drop(latest);
        return refused;
    }
    int result = latest ? wait_until(&latest->done, 1, -1) : ACL_SUCCESS;
    if (!result) result = record_error(latest);
    drop(latest);
    return result;
}

enum { EVENT_NOT_READY = 0, EVENT_COMPLETE = 1 };
int aclrtQueryEventStatus(Event *event, int *status) {
    Record *latest = hold_latest(event);
    int refused = refuse_captured(latest);
    *status = is_reached(latest) ? EVENT_COMPLETE : EVENT_NOT_READY;
    drop(latest);
    if (refused) return refused;
    if (*status == EVENT_NOT_READY) progress_of_a_query();
    return ACL_SUCCESS;
}

int aclrtQueryEventWaitStatus(Event *event, int *status) {
    *status = 0; /* complete */
    return ACL_SUCCESS;
}

/* Set `at` to the time when the event was reached. Return whether it was. */
static bool time_of(Event *event, struct timespec *at) {
    Record *latest = hold_latest(event);
    bool known = latest && is_reached(latest);
    if (known) *at = latest->at;
    drop(latest);
    return known;
}

int aclrtEventElapsedTime(float *out, Event *from, Event *to) {
    struct timespec began, ended;
    if (!time_of(from, &began) || !time_of(to, &ended)) {
        set_message("the time between two events is known when both were recorded and reached");
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    *out = (float)milliseconds(began, ended);
    return ACL_SUCCESS;
}

int aclrtEventGetTimestamp(Event *event, uint64_t *microseconds) {
    struct timespec at;
    if (!time_of(event, &at)) return ACL_ERROR_RT_PARAM_INVALID;
    *microseconds = (uint64_t)at.tv_sec * 1000000 + at.tv_nsec / 1000;
    return ACL_SUCCESS;
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
    task->head = (Task){.step = call_host, .name = "host function"};
    task->function = function;
    task->data = data;
    return launch_task(stream, &task->head);
}

int aclrtLaunchCallback(void (*function)(void *), void *data, int blocking, Stream *stream) {
    return aclrtLaunchHostFunc(stream, function, data);
}

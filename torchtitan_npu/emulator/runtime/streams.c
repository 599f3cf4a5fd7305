/* Streams and events.
 *
 * A stream is a queue of tasks. A task on an idle stream runs at once, in the thread that launches it: that is fast,
 * and an error has the traceback of its cause. A task that has to wait (for an event, for other ranks), and every task
 * behind it, is queued; the device thread runs queued tasks, and so does any thread that synchronises.
 *
 * With NPU_EMULATOR_SEED set, every task is queued and none runs before a thread synchronises. Which stream goes on then
 * depends on the seed, on the streams and on how far they are, but not on time: a stream has a priority that lasts for
 * several tasks. So whatever no event orders is reordered, and a missing wait gives a wrong number.
 *
 * Other processes may wait for a collective, and other threads for a host function, without calling the emulator. If such
 * a task is queued and nothing was called for a while, the device thread runs the queue. Time has an influence there, and
 * where a stream waits for another rank.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <time.h>

struct stream {
    stream *next;
    task *first, *last;
    uint64_t launched, done;
    uint64_t done_before_seed; /* tasks that had ended when the seed was set */
    int id, error;
    bool busy; /* a thread runs its first task */
    char *message;
};

/* One record of an event on a stream. Whoever waits for it holds it, so that recording the event again, on any stream,
 * changes nothing for them. */
typedef struct {
    int references;
    uint64_t done; /* 1 when its stream has reached it */
    struct timespec at;
    int error; /* of the stream that reached it: whoever waits for a failed task fails */
    const char *message;
} record;

typedef struct {
    record *latest; /* NULL before the first record */
} event;

enum { IDLE_BEFORE_DEVICE_THREAD_MS = 20, POLL_US = 50, LONGEST_POLL_US = 1000, TASKS_PER_PRIORITY = 8 };
enum { QUERIES_PER_TASK = 4, QUERIES_OF_AN_OBSERVER = 1000, LONGEST_WAIT_AT_EXIT_MS = 500 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work;    /* a task was queued; the device thread waits for it */
static pthread_cond_t changed; /* a task has ended; threads that wait for one are counted in `sleepers` */
static pthread_once_t started = PTHREAD_ONCE_INIT;
static stream *streams, default_stream;
static uint64_t launches, seed, seeds_set;
static int stream_count, queued, queued_for_others, sleepers;
static bool running; /* a thread runs a task of a seeded order */
static const char *last_failure; /* the message of a queued task */
static struct timespec last_call;

__attribute__((constructor)) static void read_settings(void) { seed = (uint64_t)setting_number("NPU_EMULATOR_SEED", 0); }

bool order_is_seeded(void) { return __atomic_load_n(&seed, __ATOMIC_RELAXED) != 0; }
int emulator_stream_id(const stream *one) { return one ? one->id : 0; }

/* The lock is held. A larger number goes first: the task that was launched first, or what the seed says. */
static uint64_t priority_of(const stream *on) {
    if (!seed) return UINT64_MAX - on->first->order;
    uint64_t of_stream = mix(seed, (uint64_t)on->id), tasks = on->done - on->done_before_seed + of_stream % TASKS_PER_PRIORITY;
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
static void finish(stream *on, int result) {
    on->done++;
    if (result && !on->error) {
        on->error = result;
        on->message = strdup(message());
        last_failure = on->message;
    }
    if (sleepers) pthread_cond_broadcast(&changed); /* a system call: not for every launch */
}

static void free_task(task *one) {
    if (one->release) one->release(one);
    else free(one);
}

static int call_host(task *one);
static bool is_for_others(const task *one) { return one->category == COLLECTIVE || one->step == call_host; }

/* The lock is held: try the first task of the stream. Return whether it ended. */
static bool try_first(stream *on) {
    task *one = on->first;
    on->busy = true;
    running = true;
    pthread_mutex_unlock(&lock);
    int result = recording ? recorded_step(one) : one->step(one);
    pthread_mutex_lock(&lock);
    running = false;
    on->busy = false;
    if (result == PENDING) return false;
    on->first = one->next;
    if (!on->first) on->last = NULL;
    queued--;
    queued_for_others -= is_for_others(one);
    finish(on, result);
    pthread_mutex_unlock(&lock);
    free_task(one);
    pthread_mutex_lock(&lock);
    return true;
}

/* The lock is held: run one queued task, the first launched one or the one that the seed chooses. */
static bool run_one(void) {
    if (seed && running) return false; /* one after the other: the order is that of the seed */
    uint64_t below = UINT64_MAX;       /* streams with a higher priority were tried, and their first task is pending */
    for (;;) {
        stream *best = NULL;
        uint64_t highest = 0;
        for (stream *on = streams; on; on = on->next) {
            if (!on->first || on->busy) continue;
            uint64_t priority = priority_of(on);
            if (priority < below && priority >= highest) {
                best = on;
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
    for (stream *on = streams; on; on = on->next) on->first = on->last = NULL, on->busy = false, on->done = on->launched;
    queued = queued_for_others = sleepers = 0;
    running = false;
    stream *inherited = streams;
    start();
    streams = inherited;
}

__attribute__((constructor)) static void prepare(void) {
    hold_during_fork(&lock);
    pthread_atfork(NULL, NULL, in_child);
}

int aclrtSynchronizeDevice(void);

/* Change the seed of a process that runs in a seeded order (seeds.py). */
EXPORTED void emulator_set_seed(uint64_t value) {
    aclrtSynchronizeDevice();
    pthread_mutex_lock(&lock);
    __atomic_store_n(&seed, value, __ATOMIC_RELAXED);
    seeds_set++;
    for (stream *on = streams; on; on = on->next) on->done_before_seed = on->done;
    pthread_mutex_unlock(&lock);
}

static __thread bool has_launched; /* this thread */

int launch_task(stream *on, task *one) {
    pthread_once(&started, start);
    if (!on) on = &default_stream;
    has_launched = true;
    one->next = NULL;
    one->on = on;
    if (recording) record_launch(one);
    pthread_mutex_lock(&lock);
    one->order = ++launches;
    on->launched++;
    if (!seed && !on->first && !on->busy) {
        on->busy = true;
        pthread_mutex_unlock(&lock);
        int result = recording ? recorded_step(one) : one->step(one);
        pthread_mutex_lock(&lock);
        on->busy = false;
        if (result != PENDING) {
            finish(on, ACL_SUCCESS); /* the caller has the error */
            pthread_mutex_unlock(&lock);
            free_task(one);
            return result;
        }
        one->next = on->first; /* in front of what other threads have queued meanwhile */
        on->first = one;
        if (!on->last) on->last = one;
    } else {
        if (on->last) on->last->next = one;
        else on->first = one;
        on->last = one;
    }
    queued++;
    queued_for_others += is_for_others(one);
    if (seed) last_call = now();
    if (!seed || queued_for_others == 1) pthread_cond_signal(&work);
    if (sleepers) pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* The GIL, without linking to Python: the emulator also loads in programs without it. */

static int (*holds_gil)(void);
static void *(*save_thread)(void);
static void (*restore_thread)(void *);
static pthread_once_t python_found = PTHREAD_ONCE_INIT;

static void find_python(void) {
    holds_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    save_thread = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    restore_thread = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}

void *release_gil(void) {
    pthread_once(&python_found, find_python);
    return holds_gil && save_thread && restore_thread && holds_gil() ? save_thread() : NULL;
}

void take_gil(void *released) {
    if (released) restore_thread(released);
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

static int error_of(stream *on) {
    pthread_mutex_lock(&lock);
    int error = on->error;
    if (error) set_message("%s", on->message);
    pthread_mutex_unlock(&lock);
    return error;
}

int aclrtSynchronizeStreamWithTimeout(stream *on, int32_t timeout_ms) {
    if (!on) on = &default_stream;
    pthread_mutex_lock(&lock);
    uint64_t launched = on->launched;
    pthread_mutex_unlock(&lock);
    int result = wait_until(&on->done, launched, timeout_ms);
    return result ? result : error_of(on);
}

/* Streams are added in front of the list and stay: behind its head, the list is constant. */
static stream *first_stream(void) {
    pthread_once(&started, start);
    pthread_mutex_lock(&lock);
    stream *first = streams;
    pthread_mutex_unlock(&lock);
    return first;
}

int aclrtSynchronizeStream(stream *on) { return aclrtSynchronizeStreamWithTimeout(on, -1); }

int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    int first = ACL_SUCCESS;
    for (stream *on = first_stream(); on; on = on->next) { /* all of them: the caller may free what they use */
        int result = aclrtSynchronizeStreamWithTimeout(on, timeout_ms);
        if (!first) first = result;
    }
    return first;
}

int aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

/* A queued call needs the interpreter. What waits for other ranks is given up: they may have ended. */
const char *emulator_finish_queue(void) {
    struct timespec progress = now();
    pthread_mutex_lock(&lock);
    last_failure = NULL; /* earlier ones were returned to those who synchronised */
    while (queued && milliseconds(progress, now()) < LONGEST_WAIT_AT_EXIT_MS) {
        if (run_one()) progress = now();
        else wait_to_poll(progress);
    }
    const char *failed = last_failure;
    pthread_mutex_unlock(&lock);
    return failed;
}

/* Streams */

int aclrtCreateStreamWithConfig(stream **out, uint32_t priority, uint32_t flags) {
    pthread_once(&started, start);
    stream *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&lock);
    made->id = ++stream_count;
    made->next = streams;
    streams = made;
    pthread_mutex_unlock(&lock);
    *out = made;
    return ACL_SUCCESS;
}

int aclrtCreateStream(stream **out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

/* A destroyed stream stays in the list: its tasks still run, and a handle that is used afterwards does not crash. */
int aclrtDestroyStream(stream *on) { return ACL_SUCCESS; }
int aclrtDestroyStreamForce(stream *on) { return ACL_SUCCESS; }

int aclrtStreamGetId(stream *on, int32_t *id) {
    *id = emulator_stream_id(on);
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
int aclrtStreamQuery(stream *on, int *status) {
    if (!on) on = &default_stream;
    pthread_mutex_lock(&lock);
    *status = on->done == on->launched ? STREAM_COMPLETE : STREAM_NOT_READY;
    pthread_mutex_unlock(&lock);
    if (*status == STREAM_NOT_READY) progress_of_a_query();
    return ACL_SUCCESS;
}

/* Events */

static void drop(record *one) {
    if (one && __atomic_sub_fetch(&one->references, 1, __ATOMIC_ACQ_REL) == 0) free(one);
}

static record *hold_latest(event *of) {
    pthread_mutex_lock(&lock);
    record *one = of->latest;
    if (one) __atomic_add_fetch(&one->references, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    return one;
}

int aclrtCreateEvent(event **out) {
    *out = calloc(1, sizeof **out);
    return ACL_SUCCESS;
}
int aclrtCreateEventWithFlag(event **out, uint32_t flags) { return aclrtCreateEvent(out); }
int aclrtCreateEventExWithFlag(event **out, uint32_t flags) { return aclrtCreateEvent(out); }

int aclrtDestroyEvent(event *of) {
    drop(of->latest);
    free(of);
    return ACL_SUCCESS;
}

typedef struct {
    task head;
    record *of;
} record_task;

static void release_record_task(task *one) {
    drop(((record_task *)one)->of);
    free(one);
}

static int reach(task *one) {
    record *of = ((record_task *)one)->of;
    of->at = now();
    of->error = one->on->error;
    of->message = one->on->message;
    __atomic_store_n(&of->done, 1, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static bool is_reached(const record *of) { return !of || __atomic_load_n(&of->done, __ATOMIC_ACQUIRE); }

static int record_error(const record *of) {
    if (of && of->error) set_message("%s", of->message);
    return of ? of->error : ACL_SUCCESS;
}

static int wait_for_record(task *one) {
    record *of = ((record_task *)one)->of;
    return is_reached(of) ? record_error(of) : PENDING;
}

/* The task takes over the reference to the record. */
static int launch_record_task(record *of, stream *on, const char *name, int (*step)(task *)) {
    record_task *made = calloc(1, sizeof *made);
    made->head = (task){.step = step, .release = release_record_task, .name = name};
    made->of = of;
    return launch_task(on, &made->head);
}

int aclrtRecordEvent(event *of, stream *on) {
    record *made = calloc(1, sizeof *made);
    made->references = 2; /* of the event and of the task */
    pthread_mutex_lock(&lock);
    record *before = of->latest;
    of->latest = made;
    pthread_mutex_unlock(&lock);
    drop(before);
    return launch_record_task(made, on, "record event", reach);
}

/* The wait is for the last record before it. An event that was never recorded is no reason to wait. */
int aclrtStreamWaitEvent(stream *on, event *of) {
    return launch_record_task(hold_latest(of), on, "wait for event", wait_for_record);
}
int aclrtResetEvent(event *of, stream *on) { return ACL_SUCCESS; }

int aclrtSynchronizeEvent(event *of) {
    record *latest = hold_latest(of);
    int result = latest ? wait_until(&latest->done, 1, -1) : ACL_SUCCESS;
    if (!result) result = record_error(latest);
    drop(latest);
    return result;
}

enum { EVENT_NOT_READY = 0, EVENT_COMPLETE = 1 };
int aclrtQueryEventStatus(event *of, int *status) {
    record *latest = hold_latest(of);
    *status = is_reached(latest) ? EVENT_COMPLETE : EVENT_NOT_READY;
    drop(latest);
    if (*status == EVENT_NOT_READY) progress_of_a_query();
    return ACL_SUCCESS;
}

int aclrtQueryEventWaitStatus(event *of, int *status) {
    *status = 0; /* complete */
    return ACL_SUCCESS;
}

/* Set `at` to the time when the event was reached. Return whether it was. */
static bool time_of(event *of, struct timespec *at) {
    record *latest = hold_latest(of);
    bool known = latest && is_reached(latest);
    if (known) *at = latest->at;
    drop(latest);
    return known;
}

int aclrtEventElapsedTime(float *out, event *from, event *to) {
    struct timespec began, ended;
    if (!time_of(from, &began) || !time_of(to, &ended)) {
        set_message("the time between two events is known when both were recorded and reached");
        return ACL_ERROR_RT_PARAM_INVALID;
    }
    *out = (float)milliseconds(began, ended);
    return ACL_SUCCESS;
}

int aclrtEventGetTimestamp(event *of, uint64_t *microseconds) {
    struct timespec at;
    if (!time_of(of, &at)) return ACL_ERROR_RT_PARAM_INVALID;
    *microseconds = (uint64_t)at.tv_sec * 1000000 + at.tv_nsec / 1000;
    return ACL_SUCCESS;
}

/* Host functions on a stream */

typedef struct {
    task head;
    void (*function)(void *);
    void *data;
} host_task;

static int call_host(task *one) {
    host_task *host = (host_task *)one;
    host->function(host->data);
    return ACL_SUCCESS;
}

int aclrtLaunchHostFunc(stream *on, void (*function)(void *), void *data) {
    host_task *made = calloc(1, sizeof *made);
    made->head = (task){.step = call_host, .name = "host function"};
    made->function = function;
    made->data = data;
    return launch_task(on, &made->head);
}

int aclrtLaunchCallback(void (*function)(void *), void *data, int blocking, stream *on) {
    return aclrtLaunchHostFunc(on, function, data);
}

/* Streams.
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
#include "streams.h"
#include "recorder.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

struct Stream {
    Stream *next;
    Task *first, *last;
    uint64_t launched, done;
    uint64_t done_before_seed; /* tasks that had ended when the seed was set */
    int error;
    const Task *running_task; /* a thread runs it */
    char *message;
    Capture capture; /* its number is the stream's */
};

enum { IDLE_BEFORE_DEVICE_THREAD_US = 20000, POLL_US = 50, LONGEST_POLL_US = 1000, TASKS_PER_PRIORITY = 8 };
enum { QUERIES_PER_TASK = 4, QUERIES_OF_AN_OBSERVER = 1000, LONGEST_WAIT_AT_EXIT_US = 500000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work;    /* a task was queued; the device thread waits for it */
static pthread_cond_t changed; /* a task has ended; threads that wait for one are counted in `sleepers` */
static pthread_once_t started = PTHREAD_ONCE_INIT;
static Stream *streams, default_stream;
static uint64_t launches, seed, seeds_set;
static int stream_count, queued, queued_for_others, sleepers;
static bool running; /* a thread runs a task of a seeded order */
static const char *last_failure; /* the message of a queued task */
static double last_call;

static bool poisons;

__attribute__((constructor)) static void read_settings(void) {
    seed = (uint64_t)setting_number("NPU_EMULATOR_SEED", 0);
    poisons = seed; /* also while the seed is 0: what was used meanwhile is not fresh later */
}

bool poisons_memory(void) { return poisons; }
Capture *capture_of(Stream *stream) { return &(stream ? stream : &default_stream)->capture; }

/* The lock is held. A larger number goes first: the task that was launched first, or what the seed says. */
static uint64_t priority_of(const Stream *stream) {
    if (!seed) return UINT64_MAX - stream->first->order;
    uint64_t of_stream = mix(seed, (uint64_t)stream->capture.stream), tasks = stream->done - stream->done_before_seed + of_stream % TASKS_PER_PRIORITY;
    return mix(of_stream, tasks / TASKS_PER_PRIORITY);
}

static void wait_for_change(long microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += microseconds * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    sleepers++;
    pthread_cond_timedwait(&changed, &lock, &until);
    sleepers--;
}

/* Wait until a pending task is worth another try. The longer nothing has happened, the rarer the tries: a rank that waits
 * for others leaves them the processor, and notices them with a delay that is small beside its wait. */
static void wait_to_poll(double progress) {
    double interval = (microseconds_now() - progress) / 8;
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
    queued_for_others -= task->for_others;
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
    double progress = microseconds_now();
    pthread_mutex_lock(&lock);
    for (;;) {
        if (!(seed ? queued_for_others : queued)) {
            pthread_cond_wait(&work, &lock);
            progress = microseconds_now();
        } else if (seed && microseconds_now() - last_call < IDLE_BEFORE_DEVICE_THREAD_US) wait_for_change(1000);
        else if (run_one()) progress = microseconds_now();
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

/* Change the seed of a process that was started in a seeded order (set_seed). */
void emulator_set_seed(uint64_t value) {
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
    task->stream = stream->capture.stream;
    Graph *graph = hold_graph_of(&stream->capture);
    if (graph) {
        stream->capture.last = next_position(graph);
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
    queued_for_others += task->for_others;
    if (seed) last_call = microseconds_now();
    if (!seed || queued_for_others == 1) pthread_cond_signal(&work);
    if (sleepers) pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* Block until `counter` reaches `value`; help to run what is queued. */
int wait_until(const uint64_t *counter, uint64_t value, int timeout_ms) {
    pthread_once(&started, start);
    void *released = release_gil();
    double began = microseconds_now(), progress = began;
    int result = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) {
        if (timeout_ms >= 0 && microseconds_now() - began > timeout_ms * 1e3) {
            result = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
            break;
        }
        last_call = microseconds_now();
        if (run_one()) progress = microseconds_now();
        else wait_to_poll(progress);
    }
    pthread_mutex_unlock(&lock);
    take_gil(released);
    return result;
}

int failure_of(const Stream *stream, const char **text) {
    if (!stream) stream = &default_stream;
    pthread_mutex_lock(&lock);
    int error = stream->error;
    *text = stream->message;
    pthread_mutex_unlock(&lock);
    return error;
}

static int synchronize(Stream *stream, int32_t timeout_ms) {
    pthread_mutex_lock(&lock);
    uint64_t launched = stream->launched;
    pthread_mutex_unlock(&lock);
    int result = wait_until(&stream->done, launched, timeout_ms);
    if (result) return result;
    const char *text;
    int error = failure_of(stream, &text);
    if (error) set_message("%s", text);
    return error;
}

int aclrtSynchronizeStreamWithTimeout(Stream *stream, int32_t timeout_ms) {
    if (!stream) stream = &default_stream;
    Graph *graph = hold_graph_of(&stream->capture);
    if (graph)
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: the host cannot wait for it", stream->capture.stream);
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
    double progress = microseconds_now();
    bool computes;
    pthread_mutex_lock(&lock);
    last_failure = NULL; /* earlier ones were returned to those who synchronised */
    uint64_t done_before = count_done(&computes);
    while (queued && microseconds_now() - progress < LONGEST_WAIT_AT_EXIT_US) {
        if (!run_one()) wait_to_poll(progress);
        uint64_t done = count_done(&computes);
        if (computes || done != done_before) progress = microseconds_now();
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
    stream->capture.stream = ++stream_count;
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
    *id = capture_of(stream)->stream;
    return ACL_SUCCESS;
}

/* In a seeded order nothing runs before a thread synchronises. Some queries run a task, so that a loop of them ends. A
 * thread that only observes, such as torch_npu's watchdog, asks at intervals of time: its queries count much less. */
void progress_of_a_query(void) {
    static __thread uint64_t queries, of_seed;
    pthread_mutex_lock(&lock);
    if (seed) {
        if (of_seed != seeds_set) queries = 0;
        of_seed = seeds_set;
        queries++;
        bool runs = has_launched ? mix(seed, queries) % QUERIES_PER_TASK == 0 : queries % QUERIES_OF_AN_OBSERVER == 0;
        if (runs) run_one();
        if (has_launched) last_call = microseconds_now();
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

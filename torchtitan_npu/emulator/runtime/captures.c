/* Captures of NPU graphs. Tasks that are launched on a captured stream are kept.
 *
 * A stream that waits for an event of the capture becomes part of it, and the first stream must wait for it before the
 * capture ends. Events inside a graph have no other effect, so a seeded order does not find a missing wait there.
 *
 * Waiting for the device and collectives are errors during a capture. Like any error in it, they invalidate the graph.
 */
#include "captures.h"
#include <stdarg.h>
#include <stdio.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* aclmdlRICaptureMode */
enum { NOT_CAPTURED, ACTIVE, INVALIDATED }; /* aclmdlRICaptureStatus */

struct Graph {
    int references; /* of the program, of replays that have not ended, and of calls that use the graph */
    uint64_t id;
    Graph *next; /* in the list of captures that have not ended */
    Capture *streams;
    int origin; /* the number of the first stream */
    pthread_t thread;
    int mode;
    Task *first, **end;
    uint64_t positions; /* tasks and waits so far */
    int error;          /* of the capture */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Graph *captures;
static uint64_t graphs;
static __thread int mode_of_thread = GLOBAL;

__attribute__((constructor)) static void prepare(void) { hold_during_fork(&lock); }

uint64_t id_of(const Graph *graph) { return graph->id; }
uint64_t next_position(Graph *graph) { return __atomic_add_fetch(&graph->positions, 1, __ATOMIC_RELAXED); }
bool is_origin(const Graph *graph, const Capture *stream) { return graph->origin == stream->stream; }

static Graph *graph_of(const Capture *stream) { return __atomic_load_n(&stream->graph, __ATOMIC_ACQUIRE); }
bool is_captured(const Capture *stream) { return graph_of(stream); }

/* The lock is held. */
static Graph *find_capture(uint64_t id) {
    Graph *graph = captures;
    while (graph && graph->id != id) graph = graph->next;
    return graph;
}

/* The lock is held. */
static void add_stream(Graph *graph, Capture *stream) {
    if (graph_of(stream) == graph) return;
    stream->last = stream->joined = 0;
    stream->next = graph->streams;
    graph->streams = stream;
    __atomic_store_n(&stream->graph, graph, __ATOMIC_RELEASE);
}

Graph *hold_graph(Graph *graph) {
    if (graph) __atomic_add_fetch(&graph->references, 1, __ATOMIC_RELAXED);
    return graph;
}

void drop_graph(Graph *graph) {
    if (!graph || __atomic_sub_fetch(&graph->references, 1, __ATOMIC_ACQ_REL)) return;
    for (Task *task = graph->first, *next; task; task = next) {
        next = task->next;
        free_task(task);
    }
    free(graph);
}

/* Another thread may end the capture meanwhile. */
Graph *hold_graph_of(const Capture *stream) {
    if (!graph_of(stream)) return NULL; /* the lock is not for every launch */
    pthread_mutex_lock(&lock);
    Graph *graph = hold_graph(graph_of(stream));
    pthread_mutex_unlock(&lock);
    return graph;
}

Graph *join_capture(uint64_t id, Capture *stream) {
    pthread_mutex_lock(&lock);
    Graph *graph = find_capture(id), *before = graph_of(stream);
    if (before && before != graph) graph = NULL;
    if (graph) add_stream(graph, stream);
    hold_graph(graph);
    pthread_mutex_unlock(&lock);
    return graph;
}

/* Errors. The first one of a capture stays. */

int refuse_for_graph(Graph *graph, int code, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    set_message("%s", text);
    pthread_mutex_lock(&lock);
    if (!graph->error) graph->error = code;
    pthread_mutex_unlock(&lock);
    drop_graph(graph);
    return code;
}

int refuse_for_capture(uint64_t id, int code, const char *text) {
    set_message("%s", text);
    pthread_mutex_lock(&lock);
    Graph *graph = find_capture(id);
    if (graph && !graph->error) graph->error = code;
    pthread_mutex_unlock(&lock);
    return code;
}

int refuse_synchronization(const char *name) {
    if (mode_of_thread == RELAXED) return ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    Graph *graph = captures;
    while (graph && !(graph->mode == GLOBAL || (graph->mode == THREAD_LOCAL && pthread_equal(graph->thread, pthread_self())))) graph = graph->next;
    hold_graph(graph);
    pthread_mutex_unlock(&lock);
    return graph ? refuse_for_graph(graph, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s is not allowed during the capture of a graph", name) : ACL_SUCCESS;
}

/* Tasks */

/* The step of a task is called again in every replay. */
int capture_task(Graph *graph, Task *task) {
    if (task->category == COLLECTIVE) {
        int refused = refuse_for_graph(graph, ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: the emulator captures no collectives", task->name);
        free_task(task);
        return refused;
    }
    pthread_mutex_lock(&lock);
    bool is_valid = !graph->error;
    if (is_valid) {
        *graph->end = task;
        graph->end = &task->next;
    }
    pthread_mutex_unlock(&lock);
    drop_graph(graph);
    if (is_valid) return ACL_SUCCESS;
    set_message("%s: an earlier error has invalidated the capture", task->name);
    free_task(task);
    return ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
}

int run_graph(const Graph *graph) {
    int result = ACL_SUCCESS;
    for (Task *each = graph->first; each && !result; each = each->next) result = each->step(each);
    return result;
}

/* Begin and end */

int begin_capture(Capture *stream, int mode) {
    if (is_captured(stream)) {
        set_message("stream %d is captured already", stream->stream);
        return ACL_ERROR_RT_STREAM_CAPTURED;
    }
    Graph *graph = calloc(1, sizeof *graph);
    *graph = (Graph){.references = 1, .origin = stream->stream, .thread = pthread_self(), .mode = mode};
    graph->end = &graph->first;
    pthread_mutex_lock(&lock);
    graph->id = ++graphs;
    graph->next = captures;
    captures = graph;
    add_stream(graph, stream);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

enum { ALL_JOINED = -1 };

/* Take the capture out of the list and its streams out of the capture. Return the number of a stream whose tasks no other
 * stream has waited for. */
static int release_streams(Graph *graph) {
    int unjoined = ALL_JOINED;
    pthread_mutex_lock(&lock);
    Graph **link = &captures;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next;
    for (Capture *each = graph->streams; each; each = each->next) {
        if (!is_origin(graph, each) && each->last > each->joined) unjoined = each->stream;
        __atomic_store_n(&each->graph, NULL, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return unjoined;
}

int end_capture(Capture *stream, Graph **out) {
    Graph *graph = hold_graph_of(stream);
    *out = NULL;
    if (!graph) {
        set_message("stream %d is not captured", stream->stream);
        return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    }
    if (!is_origin(graph, stream))
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on stream %d", stream->stream);
    if (!pthread_equal(graph->thread, pthread_self()))
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "a capture must end on the thread on which it began");
    int unjoined = release_streams(graph);
    pthread_mutex_lock(&lock); /* a call that found the graph at a stream may hold it and set the error */
    int error = graph->error;
    pthread_mutex_unlock(&lock);
    drop_graph(graph); /* what remains is the reference of the program */
    if (!error && unjoined == ALL_JOINED) {
        *out = graph;
        return ACL_SUCCESS;
    }
    drop_graph(graph);
    if (!error) {
        set_message("stream %d has captured tasks that stream %d does not wait for", unjoined, stream->stream);
        return ACL_ERROR_RT_STREAM_UNJOINED;
    }
    set_message("an error has invalidated the capture of a graph: %d", error);
    return ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
}

int capture_status(const Capture *stream, Graph **out) {
    Graph *graph = hold_graph_of(stream);
    pthread_mutex_lock(&lock);
    int status = !graph ? NOT_CAPTURED : graph->error ? INVALIDATED : ACTIVE;
    pthread_mutex_unlock(&lock);
    if (out) *out = graph;
    drop_graph(graph);
    return status;
}

int exchange_capture_mode(int mode) {
    int before = mode_of_thread;
    mode_of_thread = mode;
    return before;
}

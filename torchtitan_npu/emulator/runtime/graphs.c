/* NPU graphs: capture and replay (aclmdlRI…).
 *
 * Tasks that are launched on a captured stream are kept. A replay runs them one after the other, in the order of their
 * launches, as one task of its stream. A stream that waits for an event of the capture becomes part of it, and the first
 * stream must wait for it before the capture ends. Events inside a graph have no other effect, so a seeded order does not
 * find a missing wait there.
 *
 * Waiting for the device and collectives are errors during a capture. Like any error in it, they invalidate the graph.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* aclmdlRICaptureMode */
enum { NOT_CAPTURED, ACTIVE, INVALIDATED }; /* aclmdlRICaptureStatus */

struct Graph {
    int references; /* of the program, of replays that have not ended, and of calls that use the graph */
    uint64_t id;
    Graph *next; /* in the list of captures that have not ended */
    Stream *origin;
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
bool is_origin(const Graph *graph, const Stream *stream) { return emulator_stream_id(graph->origin) == emulator_stream_id(stream); }

/* The lock is held. */
static Graph *find_capture(uint64_t id) {
    Graph *graph = captures;
    while (graph && graph->id != id) graph = graph->next;
    return graph;
}

static Graph *hold(Graph *graph) {
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

Graph *hold_graph_of(const Stream *stream) {
    if (!graph_of(stream)) return NULL;
    pthread_mutex_lock(&lock);
    Graph *graph = hold(graph_of(stream));
    pthread_mutex_unlock(&lock);
    return graph;
}

Graph *join_capture(uint64_t id, Stream *stream) {
    pthread_mutex_lock(&lock);
    Graph *graph = find_capture(id), *own = graph_of(stream);
    if (own && own != graph) graph = NULL;
    if (graph) add_to_graph(stream, graph);
    hold(graph);
    pthread_mutex_unlock(&lock);
    return graph;
}

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
    hold(graph);
    pthread_mutex_unlock(&lock);
    return graph ? refuse_for_graph(graph, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s is not allowed during the capture of a graph", name) : ACL_SUCCESS;
}

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

int aclmdlRICaptureBegin(Stream *stream, int mode) {
    if (graph_of(stream)) {
        set_message("stream %d is captured already", emulator_stream_id(stream));
        return ACL_ERROR_RT_STREAM_CAPTURED;
    }
    Graph *graph = calloc(1, sizeof *graph);
    *graph = (Graph){.references = 1, .origin = stream, .thread = pthread_self(), .mode = mode};
    graph->end = &graph->first;
    pthread_mutex_lock(&lock);
    graph->id = ++graphs;
    graph->next = captures;
    captures = graph;
    pthread_mutex_unlock(&lock);
    add_to_graph(stream, graph);
    return ACL_SUCCESS;
}

int aclmdlRICaptureEnd(Stream *stream, Graph **out) {
    Graph *graph = hold_graph_of(stream);
    *out = NULL;
    if (!graph) {
        set_message("stream %d is not captured", emulator_stream_id(stream));
        return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    }
    if (!is_origin(graph, stream))
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on stream %d", emulator_stream_id(stream));
    if (!pthread_equal(graph->thread, pthread_self()))
        return refuse_for_graph(graph, ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "a capture must end on the thread on which it began");
    pthread_mutex_lock(&lock);
    Graph **link = &captures;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next; /* no stream joins the capture any more */
    pthread_mutex_unlock(&lock);
    const Stream *unjoined = end_capture(graph);
    pthread_mutex_lock(&lock); /* a call that found the graph at a stream holds it now */
    int error = graph->error;
    pthread_mutex_unlock(&lock);
    drop_graph(graph); /* what remains is the reference of the program */
    if (!error && !unjoined) {
        *out = graph;
        return ACL_SUCCESS;
    }
    drop_graph(graph);
    if (!error) {
        set_message("stream %d has captured tasks that stream %d does not wait for", emulator_stream_id(unjoined), emulator_stream_id(stream));
        return ACL_ERROR_RT_STREAM_UNJOINED;
    }
    set_message("an error has invalidated the capture of a graph: %d", error);
    return ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
}

int aclmdlRICaptureGetInfo(Stream *stream, int *status, Graph **out) {
    Graph *graph = hold_graph_of(stream);
    pthread_mutex_lock(&lock);
    *status = !graph ? NOT_CAPTURED : graph->error ? INVALIDATED : ACTIVE;
    pthread_mutex_unlock(&lock);
    if (out) *out = graph;
    drop_graph(graph);
    return ACL_SUCCESS;
}

int aclmdlRICaptureThreadExchangeMode(int *mode) {
    int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return ACL_SUCCESS;
}

typedef struct {
    Task head;
    Graph *graph;
} Replay;

static int replay(Task *task) {
    int result = ACL_SUCCESS;
    for (Task *each = ((Replay *)task)->graph->first; each && !result; each = each->next) result = each->step(each);
    return result;
}

static void release_replay(Task *task) {
    drop_graph(((Replay *)task)->graph);
    free(task);
}

int aclmdlRIExecuteAsync(Graph *graph, Stream *stream) {
    Graph *captured = hold_graph_of(stream);
    if (captured) return refuse_for_graph(captured, ACL_ERROR_RT_STREAM_CAPTURED, "a graph cannot be replayed on a stream that is captured");
    Replay *task = calloc(1, sizeof *task);
    task->head = (Task){.step = replay, .release = release_replay, .name = "graph replay", .category = REPLAY};
    task->graph = hold(graph);
    return launch_task(stream, &task->head);
}

int aclmdlRIDestroy(Graph *graph) {
    drop_graph(graph);
    return ACL_SUCCESS;
}

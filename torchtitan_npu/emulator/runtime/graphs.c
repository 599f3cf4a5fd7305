/* NPU graphs (aclmdlRI…): a replay runs the tasks of a capture one after the other, in the order of their launches, as one
 * task of its stream. */
#include "streams.h"

int aclmdlRICaptureBegin(Stream *stream, int mode) { return begin_capture(capture_of(stream), mode); }
int aclmdlRICaptureEnd(Stream *stream, Graph **out) { return end_capture(capture_of(stream), out); }

int aclmdlRICaptureGetInfo(Stream *stream, int *status, Graph **out) {
    *status = capture_status(capture_of(stream), out);
    return ACL_SUCCESS;
}

int aclmdlRICaptureThreadExchangeMode(int *mode) {
    *mode = exchange_capture_mode(*mode);
    return ACL_SUCCESS;
}

typedef struct {
    Task head;
    Graph *graph;
} Replay;

static int replay(Task *task) { return run_graph(((Replay *)task)->graph); }

static void release_replay(Task *task) {
    drop_graph(((Replay *)task)->graph);
    free(task);
}

int aclmdlRIExecuteAsync(Graph *graph, Stream *stream) {
    Graph *captured = hold_graph_of(capture_of(stream));
    if (captured) return refuse_for_graph(captured, ACL_ERROR_RT_STREAM_CAPTURED, "a graph cannot be replayed on a stream that is captured");
    Replay *task = calloc(1, sizeof *task);
    task->head = (Task){.step = replay, .release = release_replay, .name = "graph replay", .category = REPLAY};
    task->graph = hold_graph(graph);
    return launch_task(stream, &task->head);
}

int aclmdlRIDestroy(Graph *graph) {
    drop_graph(graph);
    return ACL_SUCCESS;
}

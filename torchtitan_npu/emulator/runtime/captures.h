/* Captures: tasks of a stream are kept in a graph instead of run (captures.c). */
#pragma once
#include "calls.h"

#pragma GCC visibility push(hidden)
typedef struct Graph Graph;
typedef struct Capture { /* a stream's part in a capture; each stream has one */
    Graph *graph;           /* NULL: the stream is not captured. What follows is of this capture */
    struct Capture *next;   /* of the graph's streams */
    uint64_t last;          /* position of the stream's last task in the graph */
    uint64_t joined;        /* its tasks up to this position are before a task of another stream */
    int stream;             /* the stream's number */
} Capture;

bool is_captured(const Capture *stream);
Graph *hold_graph_of(const Capture *stream); /* that the stream is captured into, or NULL. It stays until drop_graph */
Graph *join_capture(uint64_t id, Capture *stream); /* add the stream and hold the graph; NULL: it has ended, or the stream has another */
void drop_graph(Graph *graph);
Graph *hold_graph(Graph *graph);

int begin_capture(Capture *stream, int mode);
int end_capture(Capture *stream, Graph **out); /* the program then holds the graph */
int capture_status(const Capture *stream, Graph **out); /* aclmdlRICaptureStatus; the graph is NULL if there is none */
int exchange_capture_mode(int mode); /* of this thread; return the one before */
int run_graph(const Graph *graph);   /* one task after the other */

/* Both drop the graph. */
int capture_task(Graph *graph, Task *task);
int refuse_for_graph(Graph *graph, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
int refuse_for_capture(uint64_t id, int code, const char *text); /* also if it has ended */
int refuse_synchronization(const char *name); /* an error code if this thread may not wait for the device now */
uint64_t id_of(const Graph *graph);
uint64_t next_position(Graph *graph); /* of a task or wait in the graph */
bool is_origin(const Graph *graph, const Capture *stream); /* the capture began on this stream */
#pragma GCC visibility pop

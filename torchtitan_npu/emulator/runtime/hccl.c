/* HCCL's collectives, sends and receives, as tasks on streams.
 *
 * All collectives work alike: each rank publishes its data with a table that says which part each rank gets; when all
 * have published, each rank copies or reduces its parts. The data of a rank is overwritten by the next collective
 * of the communicator, after all ranks have finished this one. Collectives of a communicator run in the order of their
 * calls, whatever their streams.
 *
 * A send ends when its data is received. Sends and receives of a group make progress independently of each other, as
 * HCCL documents for HcclBatchSendRecv.
 *
 * No step blocks. A step that has waited longer than HCCL_EXEC_TIMEOUT fails: the stream has the error of a task time-out,
 * the communicator has HCCL_E_TIMEOUT.
 */
#include "communicator.h"
#include "memory.h"
#include "reduction.h"
#include <stdio.h>
#include <string.h>

/* All-reduces of more bytes are computed in parts, one on each rank, and then gathered. */
enum { REDUCE_IN_PARTS = 1 << 16 };

typedef struct {
    uint64_t offset, bytes;
} Part;

typedef struct Operation {
    struct Operation *next;
    Communicator *communicator;
    Stream *stream;
    int (*step)(struct Operation *);
    enum { WAIT_FOR_ROOM, WAIT_FOR_DATA, WAIT_FOR_PARTS, WAIT_FOR_RECEIPT, DONE } phase;
    uint64_t number; /* among the collectives of the communicator, or the messages of the pair */
    double began;
    Description what;
    uint32_t peer;
    char *send, *receive;
    uint64_t bytes; /* to send; of a message, its size */
    Part parts[];   /* of `send`, by receiving rank; then of `receive`, by sending rank */
} Operation;

static const Part *receives(const Operation *operation) { return operation->parts + operation->communicator->ranks; }

static Member *member_of(const Operation *operation, uint32_t rank) { return &operation->communicator->shared->members[rank]; }

/* Waiting */

typedef uint64_t (*Counter)(const Operation *operation, uint32_t rank);
static uint64_t published(const Operation *operation, uint32_t rank) {
    return __atomic_load_n(&member_of(operation, rank)->published, __ATOMIC_ACQUIRE);
}
static uint64_t reduced(const Operation *operation, uint32_t rank) {
    return __atomic_load_n(&member_of(operation, rank)->reduced, __ATOMIC_ACQUIRE);
}
static uint64_t finished(const Operation *operation, uint32_t rank) {
    return __atomic_load_n(&member_of(operation, rank)->finished, __ATOMIC_ACQUIRE);
}

static bool is_late(Operation *operation) {
    double now = microseconds_now();
    if (!operation->began) operation->began = now;
    return operation->communicator->timeout && now - operation->began > operation->communicator->timeout * 1e6;
}

static int time_out(Operation *operation, const bool *missing) {
    Communicator *communicator = operation->communicator;
    return fail(communicator, HCCL_E_TIMEOUT, "communicator %s: %s %llu of rank %u has waited %lld s (HCCL_EXEC_TIMEOUT) in vain for %s",
                communicator->name, operation->what.name, (unsigned long long)operation->number, communicator->rank,
                (long long)communicator->timeout, list_ranks(communicator, missing));
}

/* Return 0 if the counter of every rank has reached the value. */
static int wait_for_all(Operation *operation, Counter counter, uint64_t value) {
    Communicator *communicator = operation->communicator;
    uint32_t rank = 0;
    while (rank < communicator->ranks && counter(operation, rank) >= value) rank++;
    if (rank == communicator->ranks) return ACL_SUCCESS;
    if (!is_late(operation)) return PENDING;
    bool *missing = calloc(communicator->ranks, sizeof *missing);
    for (rank = 0; rank < communicator->ranks; rank++) missing[rank] = counter(operation, rank) < value;
    int result = time_out(operation, missing);
    free(missing);
    return result;
}

static int wait_for_peer(Operation *operation, const uint64_t *counter, uint64_t value) {
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= value) return ACL_SUCCESS;
    if (!is_late(operation)) return PENDING;
    bool *missing = calloc(operation->communicator->ranks, sizeof *missing);
    missing[operation->peer] = true;
    int result = time_out(operation, missing);
    free(missing);
    return result;
}

static int communicator_error(Communicator *communicator) {
    return fail(communicator, HCCL_E_UNAVAIL, "the communicator has failed"); /* the first error and its message stay */
}

/* Collectives. The file of a rank: the table of its parts, its data, its part of the result of an all-reduce. */

static uint64_t table_bytes(const Operation *operation) { return operation->communicator->ranks * sizeof(Part); }

static const char *file_name(uint32_t rank) {
    static __thread char name[16];
    snprintf(name, sizeof name, "%u", rank);
    return name;
}

static bool in_parts(const Operation *operation) {
    return !strcmp(operation->what.name, "HcclAllReduce") && operation->bytes > REDUCE_IN_PARTS && operation->communicator->ranks > 2;
}

/* The part of an all-reduce that a rank computes. */
static Part reduced_part(const Operation *operation, uint32_t rank) {
    uint64_t size = DTYPE_SIZE[operation->what.dtype], count = operation->what.count, ranks = operation->communicator->ranks;
    uint64_t from = count * rank / ranks, to = count * (rank + 1) / ranks;
    return (Part){from * size, (to - from) * size};
}

static int publish(Operation *operation) {
    Communicator *communicator = operation->communicator;
    uint64_t size = table_bytes(operation) + operation->bytes * (in_parts(operation) ? 2 : 1);
    Mapping *file = &communicator->data[communicator->rank];
    char *to = map_to_write(communicator, file, file_name(communicator->rank), size);
    if (!to) return communicator_error(communicator);
    memcpy(to, operation->parts, table_bytes(operation));
    if (operation->bytes) memcpy(to + table_bytes(operation), operation->send, operation->bytes);
    Member *own = member_of(operation, communicator->rank);
    own->version = file->version;
    own->what = operation->what;
    __atomic_store_n(&own->published, operation->number, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static const char *describe(const Description *what) {
    static __thread char texts[2][160];
    static __thread int next;
    char *text = texts[next ^= 1];
    snprintf(text, sizeof texts[0], "%s of %llu elements, dtype %d, op %s, root %llu", what->name, (unsigned long long)what->count,
             what->dtype, what->op < 0 ? "none" : OP_NAMES[what->op], (unsigned long long)what->root);
    return text;
}

/* Return where the data of a rank lies; NULL after an error. */
static const char *data_of(Operation *operation, uint32_t rank) {
    Communicator *communicator = operation->communicator;
    Member *from = member_of(operation, rank);
    if (memcmp(&from->what, &operation->what, sizeof operation->what)) {
        fail(communicator, HCCL_E_PARA, "communicator %s: collective %llu is %s on rank %u, but %s on rank %u", communicator->name,
             (unsigned long long)operation->number, describe(&operation->what), communicator->rank, describe(&from->what), rank);
        return NULL;
    }
    Mapping *file = &communicator->data[rank];
    if (rank == communicator->rank) return file->at + table_bytes(operation);
    const char *at = map_to_read(communicator, file, file_name(rank), table_bytes(operation), from->version);
    return at ? at + table_bytes(operation) : NULL;
}

static Part part_for(const Operation *operation, const char *data, uint32_t rank) {
    Part found;
    memcpy(&found, data - table_bytes(operation) + rank * sizeof found, sizeof found);
    return found;
}

/* Set `from` to the data of all ranks. */
static bool find_data(Operation *operation, const char **from) {
    for (uint32_t rank = 0; rank < operation->communicator->ranks; rank++)
        if (!(from[rank] = data_of(operation, rank))) return false;
    return true;
}

static int copy_parts(Operation *operation, const char **from) {
    Communicator *communicator = operation->communicator;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        Part sent = part_for(operation, from[rank], communicator->rank), wanted = receives(operation)[rank];
        if (sent.bytes != wanted.bytes)
            return fail(communicator, HCCL_E_PARA, "communicator %s: %s %llu: rank %u sends %llu bytes to rank %u, which expects %llu",
                        communicator->name, operation->what.name, (unsigned long long)operation->number, rank,
                        (unsigned long long)sent.bytes, communicator->rank, (unsigned long long)wanted.bytes);
        if (sent.bytes) memcpy(operation->receive + wanted.offset, from[rank] + sent.offset, sent.bytes);
    }
    return ACL_SUCCESS;
}

/* Reduce as many bytes of each rank. */
static void reduce_bytes(const Operation *operation, char *to, const char **from, uint64_t bytes) {
    const Description *what = &operation->what;
    reduce(to, (const void *const *)from, operation->communicator->ranks, bytes / DTYPE_SIZE[what->dtype], what->dtype, what->op);
}

static int reduce_parts(Operation *operation, const char **from) {
    Communicator *communicator = operation->communicator;
    uint64_t bytes = receives(operation)[0].bytes;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        Part sent = part_for(operation, from[rank], communicator->rank);
        if (sent.bytes != bytes)
            return fail(communicator, HCCL_E_PARA, "communicator %s: %s %llu: rank %u has %llu bytes for rank %u, which expects %llu",
                        communicator->name, operation->what.name, (unsigned long long)operation->number, rank,
                        (unsigned long long)sent.bytes, communicator->rank, (unsigned long long)bytes);
        from[rank] += sent.offset;
    }
    if (bytes) reduce_bytes(operation, operation->receive, from, bytes);
    return ACL_SUCCESS;
}

/* Reduce the part of this rank into its own file, behind its data. */
static void reduce_own_part(Operation *operation, const char **from) {
    Communicator *communicator = operation->communicator;
    Part own = reduced_part(operation, communicator->rank);
    char *to = communicator->data[communicator->rank].at + table_bytes(operation) + operation->bytes + own.offset;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) from[rank] += own.offset;
    reduce_bytes(operation, to, from, own.bytes);
    __atomic_store_n(&member_of(operation, communicator->rank)->reduced, operation->number, __ATOMIC_RELEASE);
}

static void gather_reduced_parts(Operation *operation, const char **from) {
    for (uint32_t rank = 0; rank < operation->communicator->ranks; rank++) {
        Part part = reduced_part(operation, rank);
        memcpy(operation->receive + part.offset, from[rank] + operation->bytes + part.offset, part.bytes);
    }
}

static int finish_collective(Operation *operation) {
    operation->phase = DONE;
    __atomic_store_n(&member_of(operation, operation->communicator->rank)->finished, operation->number, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static int step_collective(Operation *operation) {
    Communicator *communicator = operation->communicator;
    const char *from[communicator->ranks];
    int result;
    switch (operation->phase) {
    case WAIT_FOR_ROOM:
        if ((result = wait_for_all(operation, finished, operation->number - 1))) return result;
        if ((result = publish(operation))) return result;
        operation->phase = WAIT_FOR_DATA; /* fall through */
    case WAIT_FOR_DATA:
        if ((result = wait_for_all(operation, published, operation->number))) return result;
        if (!find_data(operation, from)) return communicator_error(communicator);
        if (!in_parts(operation)) {
            result = operation->what.op < 0 ? copy_parts(operation, from) : reduce_parts(operation, from);
            return result ? result : finish_collective(operation);
        }
        reduce_own_part(operation, from);
        operation->phase = WAIT_FOR_PARTS; /* fall through */
    case WAIT_FOR_PARTS:
        if ((result = wait_for_all(operation, reduced, operation->number))) return result;
        if (!find_data(operation, from)) return communicator_error(communicator);
        gather_reduced_parts(operation, from);
        return finish_collective(operation);
    default: return ACL_SUCCESS;
    }
}

/* Messages */

static const char *message_name(uint32_t from, uint32_t to) {
    static __thread char name[32];
    snprintf(name, sizeof name, "%u-%u", from, to);
    return name;
}

static int step_send(Operation *operation) {
    Communicator *communicator = operation->communicator;
    Channel *to = channel_between(communicator, communicator->rank, operation->peer);
    int result;
    if (operation->phase == WAIT_FOR_ROOM) {
        if ((result = wait_for_peer(operation, &to->received, operation->number - 1))) return result;
        Mapping *file = &communicator->outgoing[operation->peer];
        char *data = map_to_write(communicator, file, message_name(communicator->rank, operation->peer), operation->bytes);
        if (!data) return communicator_error(communicator);
        if (operation->bytes) memcpy(data, operation->send, operation->bytes);
        to->version = file->version;
        to->bytes = operation->bytes;
        __atomic_store_n(&to->sent, operation->number, __ATOMIC_RELEASE);
        operation->phase = WAIT_FOR_RECEIPT;
    }
    if ((result = wait_for_peer(operation, &to->received, operation->number))) return result;
    operation->phase = DONE;
    return ACL_SUCCESS;
}

static int step_receive(Operation *operation) {
    Communicator *communicator = operation->communicator;
    Channel *from = channel_between(communicator, operation->peer, communicator->rank);
    int result = wait_for_peer(operation, &from->sent, operation->number);
    if (result) return result;
    if (__atomic_load_n(&from->received, __ATOMIC_ACQUIRE) != operation->number - 1) return PENDING; /* an earlier one on another stream */
    if (from->bytes != operation->bytes)
        return fail(communicator, HCCL_E_PARA, "communicator %s: message %llu from rank %u to rank %u has %llu bytes, but %llu are expected",
                    communicator->name, (unsigned long long)operation->number, operation->peer, communicator->rank,
                    (unsigned long long)from->bytes, (unsigned long long)operation->bytes);
    const char *name = message_name(operation->peer, communicator->rank);
    const char *data = map_to_read(communicator, &communicator->incoming[operation->peer], name, operation->bytes, from->version);
    if (!data) return communicator_error(communicator);
    if (operation->bytes) memcpy(operation->receive, data, operation->bytes);
    __atomic_store_n(&from->received, operation->number, __ATOMIC_RELEASE);
    operation->phase = DONE;
    return ACL_SUCCESS;
}

/* Launches. A task holds the operations of a group that are on one stream. */

typedef struct {
    Task head;
    Operation *first;
} Batch;

static int step_batch(Task *task) {
    bool done = true;
    for (Operation *operation = ((Batch *)task)->first; operation; operation = operation->next) {
        if (operation->phase == DONE) continue;
        if (__atomic_load_n(&operation->communicator->error, __ATOMIC_ACQUIRE)) return communicator_error(operation->communicator);
        int result = operation->step(operation);
        if (result == PENDING) done = false;
        else if (result) return result;
    }
    return done ? ACL_SUCCESS : PENDING;
}

static void release_batch(Task *task) {
    for (Operation *operation = ((Batch *)task)->first, *next; operation; operation = next) {
        next = operation->next;
        drop_communicator(operation->communicator);
        free(operation);
    }
    free(task);
}

static int launch_batch(Operation *first) {
    Batch *batch = calloc(1, sizeof *batch);
    batch->first = first;
    batch->head = (Task){.step = step_batch, .release = release_batch, .name = first->what.name, .category = COLLECTIVE, .for_others = true};
    uint32_t count = 0, held = 0;
    for (Operation *operation = first; operation; operation = operation->next, count++) batch->head.bytes += operation->bytes;
    Communicator **used = calloc(count, sizeof *used); /* the task may be gone after the launch */
    for (Operation *operation = first; operation; operation = operation->next) hold_communicator(used[held++] = operation->communicator);
    if (poisons_memory())
        for (Operation *operation = first; operation; operation = operation->next) {
            if (operation->send) poison_if_fresh(operation->send, operation->stream);
            if (operation->receive) poison_if_fresh(operation->receive, operation->stream);
        }
    int result = launch_task(first->stream, &batch->head), code = HCCL_SUCCESS;
    for (uint32_t i = 0; i < count; i++) {
        if (result && !code) code = __atomic_load_n(&used[i]->error, __ATOMIC_ACQUIRE);
        drop_communicator(used[i]);
    }
    free(used);
    return result && !code ? HCCL_E_INTERNAL : code;
}

static __thread int group_depth;
static __thread Operation *group_first, **group_end;

/* Launch an operation, or add it to the group that this thread has open. */
static int submit(Operation *operation) {
    hold_communicator(operation->communicator);
    if (!group_depth) return launch_batch(operation);
    *group_end = operation;
    group_end = &operation->next;
    return HCCL_SUCCESS;
}

int HcclGroupStart(void) {
    if (!group_depth++) group_end = &group_first;
    return HCCL_SUCCESS;
}

int HcclGroupEnd(void) {
    if (!group_depth) return HCCL_E_PARA;
    if (--group_depth) return HCCL_SUCCESS;
    int result = HCCL_SUCCESS;
    for (Operation *rest = group_first; rest;) {
        Stream *stream = rest->stream;
        Operation *here = NULL, **here_end = &here, *others = NULL, **others_end = &others;
        for (Operation *operation = rest, *next; operation; operation = next) {
            next = operation->next;
            operation->next = NULL;
            Operation ***end = operation->stream == stream ? &here_end : &others_end;
            **end = operation;
            *end = &operation->next;
        }
        int launched = launch_batch(here);
        if (!result) result = launched;
        rest = others;
    }
    group_first = NULL;
    return result;
}

static Operation *make_operation(Communicator *communicator, Stream *stream, const char *name, int dtype, int op, uint32_t root, uint64_t count) {
    Operation *operation = calloc(1, sizeof *operation + 2 * communicator->ranks * sizeof(Part));
    operation->communicator = communicator;
    operation->stream = stream;
    operation->what = (Description){.dtype = dtype, .op = op, .root = root, .count = count};
    strcpy(operation->what.name, name);
    return operation;
}

/* Return 0 if the chip supports the call. */
static int check_call(Communicator *communicator, const char *name, int dtype, int op, uint32_t rank) {
    if (!usable(communicator)) return HCCL_E_UNAVAIL;
    if (rank >= communicator->ranks) {
        set_message("%s: communicator %s has %u ranks, no rank %u", name, communicator->name, communicator->ranks, rank);
        return HCCL_E_PARA;
    }
    if (op < 0 ? chip_moves(dtype) : chip_reduces(dtype, op)) return HCCL_SUCCESS;
    set_message("%s: this chip does not support HcclDataType %d%s%s", name, dtype, op < 0 ? "" : " with the reduction ",
                op < 0 ? "" : op < HCCL_OPS ? OP_NAMES[op] : "of an unknown kind");
    return HCCL_E_NOT_SUPPORT;
}

enum { NO_OP = -1 };

static int submit_collective(Operation *operation, const void *send, void *receive) {
    operation->step = step_collective;
    operation->send = (char *)send;
    operation->receive = receive;
    operation->number = ++operation->communicator->collectives;
    for (uint32_t rank = 0; rank < operation->communicator->ranks; rank++) {
        uint64_t end = operation->parts[rank].offset + operation->parts[rank].bytes;
        if (operation->parts[rank].bytes && end > operation->bytes) operation->bytes = end;
    }
    return submit(operation);
}

/* Each rank sends the same bytes to all (`to_all`), or consecutive pieces, and receives likewise. */
static int even_collective(const char *name, const void *send, void *receive, uint64_t count, int dtype, int op, bool to_all,
                           Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, name, dtype, op, 0);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, name, dtype, op, 0, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        operation->parts[rank] = (Part){to_all ? 0 : rank * bytes, bytes};
        operation->parts[communicator->ranks + rank] = (Part){rank * bytes, bytes};
    }
    return submit_collective(operation, send, receive);
}

int HcclAllReduce(void *send, void *receive, uint64_t count, int dtype, int op, Communicator *communicator, Stream *stream) {
    return even_collective("HcclAllReduce", send, receive, count, dtype, op, true, communicator, stream);
}

int HcclReduceScatter(void *send, void *receive, uint64_t count, int dtype, int op, Communicator *communicator, Stream *stream) {
    return even_collective("HcclReduceScatter", send, receive, count, dtype, op, false, communicator, stream);
}

int HcclAllGather(void *send, void *receive, uint64_t count, int dtype, Communicator *communicator, Stream *stream) {
    return even_collective("HcclAllGather", send, receive, count, dtype, NO_OP, true, communicator, stream);
}

int HcclAlltoAll(const void *send, uint64_t count, int dtype, void *receive, uint64_t receive_count, int receive_dtype, Communicator *communicator,
                 Stream *stream) {
    return even_collective("HcclAlltoAll", send, receive, count, dtype, NO_OP, false, communicator, stream);
}

int HcclBarrier(Communicator *communicator, Stream *stream) {
    return even_collective("HcclBarrier", NULL, NULL, 0, INT8, NO_OP, true, communicator, stream);
}

int HcclReduce(void *send, void *receive, uint64_t count, int dtype, int op, uint32_t root, Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclReduce", dtype, op, root);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclReduce", dtype, op, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    operation->parts[root].bytes = bytes;
    if (communicator->rank == root) operation->parts[communicator->ranks].bytes = bytes;
    return submit_collective(operation, send, receive);
}

int HcclBroadcast(void *buffer, uint64_t count, int dtype, uint32_t root, Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclBroadcast", dtype, NO_OP, root);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclBroadcast", dtype, NO_OP, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; communicator->rank == root && rank < communicator->ranks; rank++) operation->parts[rank].bytes = bytes;
    operation->parts[communicator->ranks + root].bytes = bytes;
    return submit_collective(operation, buffer, buffer);
}

int HcclScatter(void *send, void *receive, uint64_t count, int dtype, uint32_t root, Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclScatter", dtype, NO_OP, root);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclScatter", dtype, NO_OP, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; communicator->rank == root && rank < communicator->ranks; rank++) operation->parts[rank] = (Part){rank * bytes, bytes};
    operation->parts[communicator->ranks + root].bytes = bytes;
    return submit_collective(operation, send, receive);
}

/* Counts and displacements are in elements, by rank. */
int HcclReduceScatterV(void *send, const uint64_t *counts, const uint64_t *offsets, void *receive, uint64_t count, int dtype, int op,
                       Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclReduceScatterV", dtype, op, 0);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclReduceScatterV", dtype, op, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) operation->parts[rank] = (Part){offsets[rank] * size, counts[rank] * size};
    operation->parts[communicator->ranks].bytes = count * size;
    return submit_collective(operation, send, receive);
}

int HcclAllGatherV(void *send, uint64_t count, void *receive, const uint64_t *counts, const uint64_t *offsets, int dtype, Communicator *communicator,
                   Stream *stream) {
    int result = check_call(communicator, "HcclAllGatherV", dtype, NO_OP, 0);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclAllGatherV", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        operation->parts[rank].bytes = count * size;
        operation->parts[communicator->ranks + rank] = (Part){offsets[rank] * size, counts[rank] * size};
    }
    return submit_collective(operation, send, receive);
}

int HcclAlltoAllV(const void *send, const uint64_t *counts, const uint64_t *offsets, int dtype, void *receive,
                  const uint64_t *receive_counts, const uint64_t *receive_offsets, int receive_dtype, Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclAlltoAllV", dtype, NO_OP, 0);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclAlltoAllV", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        operation->parts[rank] = (Part){offsets[rank] * size, counts[rank] * size};
        operation->parts[communicator->ranks + rank] = (Part){receive_offsets[rank] * size, receive_counts[rank] * size};
    }
    return submit_collective(operation, send, receive);
}

/* The matrix has the counts from each rank (row) to each rank (column); pieces are consecutive. */
int HcclAlltoAllVC(const void *send, const uint64_t *matrix, int dtype, void *receive, int receive_dtype, Communicator *communicator, Stream *stream) {
    int result = check_call(communicator, "HcclAlltoAllVC", dtype, NO_OP, 0);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, "HcclAlltoAllVC", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype], from = 0, to = 0;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        operation->parts[rank] = (Part){from, matrix[communicator->rank * communicator->ranks + rank] * size};
        operation->parts[communicator->ranks + rank] = (Part){to, matrix[rank * communicator->ranks + communicator->rank] * size};
        from += operation->parts[rank].bytes;
        to += operation->parts[communicator->ranks + rank].bytes;
    }
    return submit_collective(operation, send, receive);
}

static int submit_message(bool is_send, void *buffer, uint64_t count, int dtype, uint32_t peer, Communicator *communicator, Stream *stream) {
    const char *name = is_send ? "HcclSend" : "HcclRecv";
    int result = check_call(communicator, name, dtype, NO_OP, peer);
    if (result) return result;
    Operation *operation = make_operation(communicator, stream, name, dtype, NO_OP, 0, count);
    operation->step = is_send ? step_send : step_receive;
    *(is_send ? &operation->send : &operation->receive) = buffer;
    operation->peer = peer;
    operation->bytes = count * DTYPE_SIZE[dtype];
    operation->number = ++(is_send ? communicator->sent : communicator->received)[peer];
    return submit(operation);
}

int HcclSend(void *send, uint64_t count, int dtype, uint32_t to, Communicator *communicator, Stream *stream) {
    return submit_message(true, send, count, dtype, to, communicator, stream);
}

int HcclRecv(void *receive, uint64_t count, int dtype, uint32_t from, Communicator *communicator, Stream *stream) {
    return submit_message(false, receive, count, dtype, from, communicator, stream);
}

typedef struct {
    enum { SEND, RECEIVE } direction;
    void *buffer;
    uint64_t count;
    int dtype;
    uint32_t peer;
} MessageItem;

int HcclBatchSendRecv(MessageItem *items, uint32_t count, Communicator *communicator, Stream *stream) {
    int result = HCCL_SUCCESS;
    HcclGroupStart();
    for (uint32_t i = 0; i < count && !result; i++) {
        int (*call)(void *, uint64_t, int, uint32_t, Communicator *, Stream *) = items[i].direction == SEND ? HcclSend : HcclRecv;
        result = call(items[i].buffer, items[i].count, items[i].dtype, items[i].peer, communicator, stream);
    }
    int launched = HcclGroupEnd();
    return result ? result : launched;
}

/* HCCL's collectives, sends and receives, as tasks on streams.
 *
 * A collective is the same for all kinds: each rank publishes its data with a table that says which part each rank gets;
 * when all have published, each rank copies or reduces its parts. The data of a rank is overwritten by the next collective
 * of the communicator, after all ranks have finished this one. Collectives of a communicator run in the order of their
 * calls, whatever their streams.
 *
 * A send ends when its data is received. Sends and receives of a group make progress independently of each other, as
 * HCCL documents for HcclBatchSendRecv.
 *
 * No step blocks. A step that has waited longer than HCCL_EXEC_TIMEOUT fails: the stream has the error of a task time-out,
 * the communicator has HCCL_E_TIMEOUT.
 */
#include "hccl.h"
#include <stdio.h>
#include <string.h>

/* All-reduces of more bytes are computed in parts, one on each rank, and then gathered. */
enum { REDUCE_IN_PARTS = 1 << 16 };

typedef struct {
    uint64_t offset, bytes;
} part;

typedef struct operation {
    struct operation *next;
    communicator *of;
    stream *on;
    int (*step)(struct operation *);
    enum { WAIT_FOR_ROOM, WAIT_FOR_DATA, WAIT_FOR_PARTS, WAIT_FOR_RECEIPT, DONE } phase;
    uint64_t number; /* among the collectives of the communicator, or the messages of the pair */
    int64_t began;
    description what;
    uint32_t peer;
    char *send, *receive;
    uint64_t bytes; /* to send; of a message, its size */
    part parts[];   /* of `send`, by receiving rank; then of `receive`, by sending rank */
} operation;

static const part *receives(const operation *one) { return one->parts + one->of->ranks; }

static member *member_of(const operation *one, uint32_t rank) { return &one->of->shared->members[rank]; }

/* Waiting */

typedef uint64_t (*counter)(const operation *one, uint32_t rank);
static uint64_t published(const operation *one, uint32_t rank) { return __atomic_load_n(&member_of(one, rank)->published, __ATOMIC_ACQUIRE); }
static uint64_t reduced(const operation *one, uint32_t rank) { return __atomic_load_n(&member_of(one, rank)->reduced, __ATOMIC_ACQUIRE); }
static uint64_t finished(const operation *one, uint32_t rank) { return __atomic_load_n(&member_of(one, rank)->finished, __ATOMIC_ACQUIRE); }

static bool is_late(operation *one) {
    int64_t now = milliseconds_now();
    if (!one->began) one->began = now;
    return one->of->timeout && now - one->began > one->of->timeout * 1000;
}

static int time_out(operation *one, const bool *missing) {
    return fail(one->of, HCCL_E_TIMEOUT, "communicator %s: %s %llu of rank %u has waited %lld s (HCCL_EXEC_TIMEOUT) in vain for %s",
                one->of->name, one->what.name, (unsigned long long)one->number, one->of->rank, (long long)one->of->timeout,
                list_ranks(one->of, missing));
}

/* Return 0 if the counter of every rank has reached the value. */
static int wait_for_all(operation *one, counter of, uint64_t value) {
    communicator *in = one->of;
    uint32_t rank = 0;
    while (rank < in->ranks && of(one, rank) >= value) rank++;
    if (rank == in->ranks) return ACL_SUCCESS;
    if (!is_late(one)) return PENDING;
    bool *missing = calloc(in->ranks, sizeof *missing);
    for (rank = 0; rank < in->ranks; rank++) missing[rank] = of(one, rank) < value;
    int result = time_out(one, missing);
    free(missing);
    return result;
}

static int wait_for_peer(operation *one, const uint64_t *of, uint64_t value) {
    if (__atomic_load_n(of, __ATOMIC_ACQUIRE) >= value) return ACL_SUCCESS;
    if (!is_late(one)) return PENDING;
    bool *missing = calloc(one->of->ranks, sizeof *missing);
    missing[one->peer] = true;
    int result = time_out(one, missing);
    free(missing);
    return result;
}

static int communicator_error(communicator *one) {
    return fail(one, HCCL_E_UNAVAIL, "the communicator has failed"); /* the first error and its message stay */
}

/* Collectives. The file of a rank: the table of its parts, its data, its part of the result of an all-reduce. */

static uint64_t table_bytes(const operation *one) { return one->of->ranks * sizeof(part); }

static const char *file_name(uint32_t rank) {
    static __thread char name[16];
    snprintf(name, sizeof name, "%u", rank);
    return name;
}

static bool in_parts(const operation *one) {
    return !strcmp(one->what.name, "HcclAllReduce") && one->bytes > REDUCE_IN_PARTS && one->of->ranks > 2;
}

/* The part of an all-reduce that a rank computes. */
static part reduced_part(const operation *one, uint32_t rank) {
    uint64_t size = DTYPE_SIZE[one->what.dtype], count = one->what.count, ranks = one->of->ranks;
    uint64_t from = count * rank / ranks, to = count * (rank + 1) / ranks;
    return (part){from * size, (to - from) * size};
}

static int publish(operation *one) {
    communicator *in = one->of;
    uint64_t size = table_bytes(one) + one->bytes * (in_parts(one) ? 2 : 1);
    mapping *file = &in->data[in->rank];
    char *to = map_to_write(in, file, file_name(in->rank), size);
    if (!to) return communicator_error(in);
    memcpy(to, one->parts, table_bytes(one));
    if (one->bytes) memcpy(to + table_bytes(one), one->send, one->bytes);
    member *own = member_of(one, in->rank);
    own->version = file->version;
    own->what = one->what;
    __atomic_store_n(&own->published, one->number, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static const char *describe(const description *what) {
    static __thread char texts[2][160];
    static __thread int next;
    char *text = texts[next ^= 1];
    snprintf(text, sizeof texts[0], "%s of %llu elements, dtype %d, op %s, root %llu", what->name, (unsigned long long)what->count,
             what->dtype, what->op < 0 ? "none" : OP_NAMES[what->op], (unsigned long long)what->root);
    return text;
}

/* Return where the data of a rank lies; NULL after an error. */
static const char *data_of(operation *one, uint32_t rank) {
    communicator *in = one->of;
    member *from = member_of(one, rank);
    if (memcmp(&from->what, &one->what, sizeof one->what)) {
        fail(in, HCCL_E_PARA, "communicator %s: collective %llu is %s on rank %u, but %s on rank %u", in->name,
             (unsigned long long)one->number, describe(&one->what), in->rank, describe(&from->what), rank);
        return NULL;
    }
    mapping *file = &in->data[rank];
    if (rank == in->rank) return file->at + table_bytes(one);
    const char *at = map_to_read(in, file, file_name(rank), table_bytes(one), from->version);
    return at ? at + table_bytes(one) : NULL;
}

static part part_for(const operation *one, const char *data, uint32_t rank) {
    part found;
    memcpy(&found, data - table_bytes(one) + rank * sizeof found, sizeof found);
    return found;
}

/* Set `from` to the data of all ranks. */
static bool find_data(operation *one, const char **from) {
    for (uint32_t rank = 0; rank < one->of->ranks; rank++)
        if (!(from[rank] = data_of(one, rank))) return false;
    return true;
}

static int copy_parts(operation *one, const char **from) {
    communicator *in = one->of;
    for (uint32_t rank = 0; rank < in->ranks; rank++) {
        part sent = part_for(one, from[rank], in->rank), wanted = receives(one)[rank];
        if (sent.bytes != wanted.bytes)
            return fail(in, HCCL_E_PARA, "communicator %s: %s %llu: rank %u sends %llu bytes to rank %u, which expects %llu", in->name,
                        one->what.name, (unsigned long long)one->number, rank, (unsigned long long)sent.bytes, in->rank,
                        (unsigned long long)wanted.bytes);
        if (sent.bytes) memcpy(one->receive + wanted.offset, from[rank] + sent.offset, sent.bytes);
    }
    return ACL_SUCCESS;
}

static int reduce_parts(operation *one, const char **from) {
    communicator *in = one->of;
    uint64_t bytes = receives(one)[0].bytes;
    for (uint32_t rank = 0; rank < in->ranks; rank++) {
        part sent = part_for(one, from[rank], in->rank);
        if (sent.bytes != bytes)
            return fail(in, HCCL_E_PARA, "communicator %s: %s %llu: rank %u has %llu bytes for rank %u, which expects %llu", in->name,
                        one->what.name, (unsigned long long)one->number, rank, (unsigned long long)sent.bytes, in->rank,
                        (unsigned long long)bytes);
        from[rank] += sent.offset;
    }
    if (bytes) reduce(one->receive, (const void *const *)from, in->ranks, bytes / DTYPE_SIZE[one->what.dtype], one->what.dtype, one->what.op);
    return ACL_SUCCESS;
}

/* Reduce the part of this rank into its own file, behind its data. */
static void reduce_own_part(operation *one, const char **from) {
    communicator *in = one->of;
    part own = reduced_part(one, in->rank);
    char *to = in->data[in->rank].at + table_bytes(one) + one->bytes + own.offset;
    for (uint32_t rank = 0; rank < in->ranks; rank++) from[rank] += own.offset;
    reduce(to, (const void *const *)from, in->ranks, own.bytes / DTYPE_SIZE[one->what.dtype], one->what.dtype, one->what.op);
    __atomic_store_n(&member_of(one, in->rank)->reduced, one->number, __ATOMIC_RELEASE);
}

static void gather_reduced_parts(operation *one, const char **from) {
    for (uint32_t rank = 0; rank < one->of->ranks; rank++) {
        part of = reduced_part(one, rank);
        memcpy(one->receive + of.offset, from[rank] + one->bytes + of.offset, of.bytes);
    }
}

static int finish(operation *one) {
    one->phase = DONE;
    __atomic_store_n(&member_of(one, one->of->rank)->finished, one->number, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
}

static int step_collective(operation *one) {
    communicator *in = one->of;
    const char *from[in->ranks];
    int result;
    switch (one->phase) {
    case WAIT_FOR_ROOM:
        if ((result = wait_for_all(one, finished, one->number - 1))) return result;
        if ((result = publish(one))) return result;
        one->phase = WAIT_FOR_DATA; /* fall through */
    case WAIT_FOR_DATA:
        if ((result = wait_for_all(one, published, one->number))) return result;
        if (!find_data(one, from)) return communicator_error(in);
        if (!in_parts(one)) {
            result = one->what.op < 0 ? copy_parts(one, from) : reduce_parts(one, from);
            return result ? result : finish(one);
        }
        reduce_own_part(one, from);
        one->phase = WAIT_FOR_PARTS; /* fall through */
    case WAIT_FOR_PARTS:
        if ((result = wait_for_all(one, reduced, one->number))) return result;
        if (!find_data(one, from)) return communicator_error(in);
        gather_reduced_parts(one, from);
        return finish(one);
    default: return ACL_SUCCESS;
    }
}

/* Messages */

static const char *message_name(uint32_t from, uint32_t to) {
    static __thread char name[32];
    snprintf(name, sizeof name, "%u-%u", from, to);
    return name;
}

static int step_send(operation *one) {
    communicator *in = one->of;
    channel *to = channel_between(in, in->rank, one->peer);
    int result;
    if (one->phase == WAIT_FOR_ROOM) {
        if ((result = wait_for_peer(one, &to->received, one->number - 1))) return result;
        mapping *file = &in->out[one->peer];
        char *data = map_to_write(in, file, message_name(in->rank, one->peer), one->bytes);
        if (!data) return communicator_error(in);
        if (one->bytes) memcpy(data, one->send, one->bytes);
        to->version = file->version;
        to->bytes = one->bytes;
        __atomic_store_n(&to->sent, one->number, __ATOMIC_RELEASE);
        one->phase = WAIT_FOR_RECEIPT;
    }
    if ((result = wait_for_peer(one, &to->received, one->number))) return result;
    one->phase = DONE;
    return ACL_SUCCESS;
}

static int step_receive(operation *one) {
    communicator *in = one->of;
    channel *from = channel_between(in, one->peer, in->rank);
    int result = wait_for_peer(one, &from->sent, one->number);
    if (result) return result;
    if (__atomic_load_n(&from->received, __ATOMIC_ACQUIRE) != one->number - 1) return PENDING; /* an earlier one on another stream */
    if (from->bytes != one->bytes)
        return fail(in, HCCL_E_PARA, "communicator %s: message %llu from rank %u to rank %u has %llu bytes, but %llu are expected", in->name,
                    (unsigned long long)one->number, one->peer, in->rank, (unsigned long long)from->bytes, (unsigned long long)one->bytes);
    const char *data = map_to_read(in, &in->in[one->peer], message_name(one->peer, in->rank), one->bytes, from->version);
    if (!data) return communicator_error(in);
    if (one->bytes) memcpy(one->receive, data, one->bytes);
    __atomic_store_n(&from->received, one->number, __ATOMIC_RELEASE);
    one->phase = DONE;
    return ACL_SUCCESS;
}

/* Launches. A task holds the operations of a group that are on one stream. */

typedef struct {
    task head;
    operation *first;
} batch;

static int step_batch(task *task) {
    bool done = true;
    for (operation *one = ((batch *)task)->first; one; one = one->next) {
        if (one->phase == DONE) continue;
        if (__atomic_load_n(&one->of->error, __ATOMIC_ACQUIRE)) return communicator_error(one->of);
        int result = one->step(one);
        if (result == PENDING) done = false;
        else if (result) return result;
    }
    return done ? ACL_SUCCESS : PENDING;
}

static void release_batch(task *task) {
    for (operation *one = ((batch *)task)->first, *next; one; one = next) {
        next = one->next;
        drop(one->of);
        free(one);
    }
    free(task);
}

static int launch_batch(operation *first) {
    batch *made = calloc(1, sizeof *made);
    made->first = first;
    made->head = (task){.step = step_batch, .release = release_batch, .name = first->what.name, .category = COLLECTIVE};
    for (operation *one = first; one; one = one->next) made->head.bytes += one->bytes;
    communicator *of = first->of;
    hold(of); /* the task may be gone after the launch */
    if (order_is_seeded())
        for (operation *one = first; one; one = one->next) {
            if (one->send) poison_if_fresh(one->send, one->on);
            if (one->receive) poison_if_fresh(one->receive, one->on);
        }
    int result = launch_task(first->on, &made->head);
    if (result) result = __atomic_load_n(&of->error, __ATOMIC_ACQUIRE);
    drop(of);
    return result;
}

static __thread int group_depth;
static __thread operation *group_first, **group_end;

/* Launch an operation, or add it to the group that this thread has open. */
static int submit(operation *one) {
    hold(one->of);
    if (!group_depth) return launch_batch(one);
    *group_end = one;
    group_end = &one->next;
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
    for (operation *rest = group_first; rest;) {
        stream *on = rest->on;
        operation *here = NULL, **here_end = &here, *others = NULL, **others_end = &others;
        for (operation *one = rest, *next; one; one = next) {
            next = one->next;
            one->next = NULL;
            operation ***end = one->on == on ? &here_end : &others_end;
            **end = one;
            *end = &one->next;
        }
        int launched = launch_batch(here);
        if (!result) result = launched;
        rest = others;
    }
    group_first = NULL;
    return result;
}

static operation *make_operation(communicator *of, stream *on, const char *name, int dtype, int op, uint32_t root, uint64_t count) {
    operation *made = calloc(1, sizeof *made + 2 * of->ranks * sizeof(part));
    made->of = of;
    made->on = on;
    made->what = (description){.dtype = dtype, .op = op, .root = root, .count = count};
    strcpy(made->what.name, name);
    return made;
}

/* Return 0 if the chip supports the call. */
static int check(communicator *of, const char *name, int dtype, int op, uint32_t rank) {
    if (!usable(of)) return HCCL_E_UNAVAIL;
    if (rank >= of->ranks) {
        set_message("%s: communicator %s has %u ranks, no rank %u", name, of->name, of->ranks, rank);
        return HCCL_E_PARA;
    }
    if (op < 0 ? chip_moves(dtype) : chip_reduces(dtype, op)) return HCCL_SUCCESS;
    set_message("%s: this chip does not support HcclDataType %d%s%s", name, dtype, op < 0 ? "" : " with the reduction ",
                op < 0 ? "" : op < HCCL_OPS ? OP_NAMES[op] : "of an unknown kind");
    return HCCL_E_NOT_SUPPORT;
}

enum { NO_OP = -1 };

static int submit_collective(operation *one, const void *send, void *receive) {
    one->step = step_collective;
    one->send = (char *)send;
    one->receive = receive;
    one->number = ++one->of->collectives;
    for (uint32_t rank = 0; rank < one->of->ranks; rank++) {
        uint64_t end = one->parts[rank].offset + one->parts[rank].bytes;
        if (one->parts[rank].bytes && end > one->bytes) one->bytes = end;
    }
    return submit(one);
}

/* Each rank sends the same bytes to all (`to_all`), or consecutive pieces, and receives likewise. */
static int even_collective(const char *name, const void *send, void *receive, uint64_t count, int dtype, int op, bool to_all,
                           communicator *of, stream *on) {
    int result = check(of, name, dtype, op, 0);
    if (result) return result;
    operation *made = make_operation(of, on, name, dtype, op, 0, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        made->parts[rank] = (part){to_all ? 0 : rank * bytes, bytes};
        made->parts[of->ranks + rank] = (part){rank * bytes, bytes};
    }
    return submit_collective(made, send, receive);
}

int HcclAllReduce(void *send, void *receive, uint64_t count, int dtype, int op, communicator *of, stream *on) {
    return even_collective("HcclAllReduce", send, receive, count, dtype, op, true, of, on);
}

int HcclReduceScatter(void *send, void *receive, uint64_t count, int dtype, int op, communicator *of, stream *on) {
    return even_collective("HcclReduceScatter", send, receive, count, dtype, op, false, of, on);
}

int HcclAllGather(void *send, void *receive, uint64_t count, int dtype, communicator *of, stream *on) {
    return even_collective("HcclAllGather", send, receive, count, dtype, NO_OP, true, of, on);
}

int HcclAlltoAll(const void *send, uint64_t count, int dtype, void *receive, uint64_t receive_count, int receive_dtype, communicator *of,
                 stream *on) {
    return even_collective("HcclAlltoAll", send, receive, count, dtype, NO_OP, false, of, on);
}

int HcclBarrier(communicator *of, stream *on) { return even_collective("HcclBarrier", NULL, NULL, 0, INT8, NO_OP, true, of, on); }

int HcclReduce(void *send, void *receive, uint64_t count, int dtype, int op, uint32_t root, communicator *of, stream *on) {
    int result = check(of, "HcclReduce", dtype, op, root);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclReduce", dtype, op, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    made->parts[root].bytes = bytes;
    if (of->rank == root) made->parts[of->ranks].bytes = bytes;
    return submit_collective(made, send, receive);
}

int HcclBroadcast(void *buffer, uint64_t count, int dtype, uint32_t root, communicator *of, stream *on) {
    int result = check(of, "HcclBroadcast", dtype, NO_OP, root);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclBroadcast", dtype, NO_OP, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; of->rank == root && rank < of->ranks; rank++) made->parts[rank].bytes = bytes;
    made->parts[of->ranks + root].bytes = bytes;
    return submit_collective(made, buffer, buffer);
}

int HcclScatter(void *send, void *receive, uint64_t count, int dtype, uint32_t root, communicator *of, stream *on) {
    int result = check(of, "HcclScatter", dtype, NO_OP, root);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclScatter", dtype, NO_OP, root, count);
    uint64_t bytes = count * DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; of->rank == root && rank < of->ranks; rank++) made->parts[rank] = (part){rank * bytes, bytes};
    made->parts[of->ranks + root].bytes = bytes;
    return submit_collective(made, send, receive);
}

/* Counts and displacements are in elements, by rank. */
int HcclReduceScatterV(void *send, const uint64_t *counts, const uint64_t *offsets, void *receive, uint64_t count, int dtype, int op,
                       communicator *of, stream *on) {
    int result = check(of, "HcclReduceScatterV", dtype, op, 0);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclReduceScatterV", dtype, op, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < of->ranks; rank++) made->parts[rank] = (part){offsets[rank] * size, counts[rank] * size};
    made->parts[of->ranks].bytes = count * size;
    return submit_collective(made, send, receive);
}

int HcclAllGatherV(void *send, uint64_t count, void *receive, const uint64_t *counts, const uint64_t *offsets, int dtype, communicator *of,
                   stream *on) {
    int result = check(of, "HcclAllGatherV", dtype, NO_OP, 0);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclAllGatherV", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        made->parts[rank].bytes = count * size;
        made->parts[of->ranks + rank] = (part){offsets[rank] * size, counts[rank] * size};
    }
    return submit_collective(made, send, receive);
}

int HcclAlltoAllV(const void *send, const uint64_t *counts, const uint64_t *offsets, int dtype, void *receive,
                  const uint64_t *receive_counts, const uint64_t *receive_offsets, int receive_dtype, communicator *of, stream *on) {
    int result = check(of, "HcclAlltoAllV", dtype, NO_OP, 0);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclAlltoAllV", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype];
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        made->parts[rank] = (part){offsets[rank] * size, counts[rank] * size};
        made->parts[of->ranks + rank] = (part){receive_offsets[rank] * size, receive_counts[rank] * size};
    }
    return submit_collective(made, send, receive);
}

/* The matrix has the counts from each rank (row) to each rank (column); pieces are consecutive. */
int HcclAlltoAllVC(const void *send, const uint64_t *matrix, int dtype, void *receive, int receive_dtype, communicator *of, stream *on) {
    int result = check(of, "HcclAlltoAllVC", dtype, NO_OP, 0);
    if (result) return result;
    operation *made = make_operation(of, on, "HcclAlltoAllVC", dtype, NO_OP, 0, 0);
    uint64_t size = DTYPE_SIZE[dtype], from = 0, to = 0;
    for (uint32_t rank = 0; rank < of->ranks; rank++) {
        made->parts[rank] = (part){from, matrix[of->rank * of->ranks + rank] * size};
        made->parts[of->ranks + rank] = (part){to, matrix[rank * of->ranks + of->rank] * size};
        from += made->parts[rank].bytes;
        to += made->parts[of->ranks + rank].bytes;
    }
    return submit_collective(made, send, receive);
}

/* `numbers` counts the messages to or from each peer. */
static int submit_message(const char *name, int (*step)(operation *), void *send, void *receive, uint64_t count, int dtype,
                          uint32_t peer, uint64_t *numbers, communicator *of, stream *on) {
    int result = check(of, name, dtype, NO_OP, peer);
    if (result) return result;
    operation *made = make_operation(of, on, name, dtype, NO_OP, 0, count);
    made->step = step;
    made->send = send;
    made->receive = receive;
    made->peer = peer;
    made->bytes = count * DTYPE_SIZE[dtype];
    made->number = ++numbers[peer];
    return submit(made);
}

int HcclSend(void *send, uint64_t count, int dtype, uint32_t to, communicator *of, stream *on) {
    return submit_message("HcclSend", step_send, send, NULL, count, dtype, to, of->sent, of, on);
}

int HcclRecv(void *receive, uint64_t count, int dtype, uint32_t from, communicator *of, stream *on) {
    return submit_message("HcclRecv", step_receive, NULL, receive, count, dtype, from, of->received, of, on);
}

typedef struct {
    enum { SEND, RECEIVE } kind;
    void *buffer;
    uint64_t count;
    int dtype;
    uint32_t peer;
} message_item;

int HcclBatchSendRecv(message_item *items, uint32_t count, communicator *of, stream *on) {
    int result = HCCL_SUCCESS;
    HcclGroupStart();
    for (uint32_t i = 0; i < count && !result; i++) {
        int (*call)(void *, uint64_t, int, uint32_t, communicator *, stream *) = items[i].kind == SEND ? HcclSend : HcclRecv;
        result = call(items[i].buffer, items[i].count, items[i].dtype, items[i].peer, of, on);
    }
    int launched = HcclGroupEnd();
    return result ? result : launched;
}

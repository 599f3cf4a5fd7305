/* Communicators of HCCL: processes that share a folder (communicator.c). */
#pragma once
#include "base.h"
#include <sys/types.h>

#pragma GCC visibility push(hidden)
enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_OOM = 24,
};
enum { NAME_LENGTH = 128, FOLDER_LENGTH = 512 };

/* What a rank calls. All ranks of a collective must agree. */
typedef struct {
    char name[24];
    int32_t dtype, op;
    uint64_t root, count; /* the count is 0 where ranks may differ; no padding, descriptions are compared as memory */
} Description;

/* The board is memory that the ranks of a communicator share. Counters are read and written with __atomic; the plain
 * fields beside them are written before the counter (release) and read after it (acquire). */
typedef struct {
    uint32_t joined;
    pid_t process;
    uint64_t published, reduced, finished; /* the last collective whose data is readable, is reduced in part, is done */
    uint32_t version;                      /* of the file that holds the data */
    Description what;
} __attribute__((aligned(64))) Member;

typedef struct { /* messages from one rank to another */
    uint64_t sent, received;
    uint32_t version;
    uint64_t bytes;
} __attribute__((aligned(64))) Channel;

typedef struct {
    uint32_t ranks;
    Member members[];
} Board;

/* A file of the communicator's folder, mapped. Its owner replaces it by a new version when it has to grow. */
typedef struct {
    char *at;
    uint64_t size;
    uint32_t version;
} Mapping;

typedef struct Communicator {
    struct Communicator *next;
    int references; /* its handle and the operations that are queued */
    uint32_t ranks, rank;
    pid_t process;
    int32_t device;
    uint64_t charged;
    int64_t timeout; /* of an operation, in seconds; 0: none */
    int lock;        /* the board's file; locked as long as the rank uses the folder */
    bool left;
    Board *shared;
    uint64_t collectives;       /* how many were called */
    uint64_t *sent, *received;  /* how many messages were called, by peer */
    Mapping *data, *outgoing, *incoming; /* by rank: collectives' data; messages to and from it */
    int error;                  /* HCCL's code; the first one stays */
    char *message;
    char folder[FOLDER_LENGTH], name[NAME_LENGTH];
} Communicator;

Channel *channel_between(Communicator *communicator, uint32_t from, uint32_t to);
bool usable(Communicator *communicator); /* false in a forked child */
void hold_communicator(Communicator *communicator);
void drop_communicator(Communicator *communicator);
int fail(Communicator *communicator, int code, const char *format, ...) __attribute__((format(printf, 3, 4))); /* return ACL's code */
const char *list_ranks(Communicator *communicator, const bool *missing); /* "ranks 1 (process 17 has ended), 3" */

/* Map the file `name` of the folder with at least this size, to write (a new version if it is too small) or to read. */
char *map_to_write(Communicator *communicator, Mapping *file, const char *name, uint64_t size);
char *map_to_read(Communicator *communicator, Mapping *file, const char *name, uint64_t size, uint32_t version);
#pragma GCC visibility pop

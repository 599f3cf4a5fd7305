/* Calls that a check has accepted. A check depends on dtypes, shapes, strides and other arguments, never on what tensors
 * hold, because CANN checks before the device computes. So the result for equal arguments is kept, with the workspace. */
#include "calls.h"
#include <string.h>

enum { ENTRIES = 4096 };

typedef struct {
    uint64_t hash;
    size_t words;
    uint64_t *key;
    uint64_t workspace;
} Entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Entry entries[ENTRIES]; /* by hash; a new call replaces the one before */

__attribute__((constructor)) static void prepare(void) { hold_during_fork(&lock); }

/* The key of the call at hand: words that describe its arguments. */
static __thread struct {
    uint64_t *words;
    size_t length, room;
} key;

static void add(uint64_t word) {
    if (key.length == key.room) {
        key.room = key.room ? 2 * key.room : 256;
        key.words = realloc(key.words, key.room * sizeof *key.words);
    }
    key.words[key.length++] = word;
}

static void add_bytes(const void *bytes, size_t size) {
    add(size);
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, (const char *)bytes + at, size - at < sizeof word ? size - at : sizeof word);
        add(word);
    }
}

static void add_tensor(const Tensor *tensor) {
    add((uint64_t)tensor->dtype << 32 | (uint64_t)tensor->rank);
    for (int i = 0; i < tensor->rank; i++) {
        add((uint64_t)tensor->shape[i]);
        add((uint64_t)tensor->stride[i]);
    }
}

static void add_scalar(const Scalar *scalar) {
    add((uint64_t)scalar->dtype);
    add_bytes(scalar->value, sizeof scalar->value);
}

static void add_object(char type, const void *pointer) {
    add(pointer != NULL);
    if (!pointer) return;
    const List *items = pointer;
    const Array *numbers = pointer;
    switch (type) {
    case 't': add_tensor(pointer); break;
    case 's': add_scalar(pointer); break;
    case 'T': case 'S':
        add(items->length);
        for (uint64_t i = 0; i < items->length; i++) add_object(type == 'T' ? 't' : 's', items->items[i]);
        break;
    case 'I': add_bytes(numbers->items, numbers->length * sizeof(int64_t)); break;
    case 'F': add_bytes(numbers->items, numbers->length * sizeof(float)); break;
    case 'B': add_bytes(numbers->items, numbers->length * sizeof(bool)); break;
    case 'z': add_bytes(pointer, strlen(pointer)); break;
    }
}

static void add_argument(char type, Argument value) {
    if (strchr("tTsSIFBz", type)) add_object(type, value.pointer);
    else if (type == 'f') add_bytes(&value.single, sizeof value.single);
    else add((uint64_t)value.integer); /* a double has the same bits */
}

static Entry *make_key(const Call *call, const void *check, uint64_t *hash) {
    key.length = 0;
    add((uintptr_t)call->operator);
    add((uintptr_t)check);
    for (int i = 0; i < call->count; i++) add_argument(call->operator->types[i], call->arguments[i]);
    *hash = key.length;
    for (size_t i = 0; i < key.length; i++) *hash = mix(*hash ^ key.words[i], 0);
    return &entries[*hash % ENTRIES];
}

bool is_accepted(const Call *call, const void *check, uint64_t *workspace) {
    uint64_t hash;
    Entry *found = make_key(call, check, &hash);
    pthread_mutex_lock(&lock);
    bool same = found->key && found->hash == hash && found->words == key.length && !memcmp(found->key, key.words, key.length * sizeof *key.words);
    if (same) *workspace = found->workspace;
    pthread_mutex_unlock(&lock);
    return same;
}

void accept_call(const Call *call, const void *check, uint64_t workspace) {
    uint64_t hash;
    Entry *to = make_key(call, check, &hash);
    uint64_t *copy = malloc(key.length * sizeof *copy);
    memcpy(copy, key.words, key.length * sizeof *copy);
    pthread_mutex_lock(&lock);
    free(to->key);
    *to = (Entry){hash, key.length, copy, workspace};
    pthread_mutex_unlock(&lock);
}

/* Records of a run: a count of launches by operator, a log of every launch, a trace of what ran when.
 *
 * NPU_EMULATOR_RECORD names them ("launches log trace"), NPU_EMULATOR_RECORD_FOLDER the folder to which each process
 * writes its own files; records.py joins them. Times are microseconds of microseconds_now.
 */
#include "recorder.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LAUNCHES = 1, LOG = 2, TRACE = 4, NAMES = 4096, PATH_LENGTH = 4096 };
static const char *const CATEGORIES[] = {[CONTROL] = "control", [COPY] = "copy", [OPERATOR] = "operator", [COLLECTIVE] = "collective", [REPLAY] = "replay"};

typedef struct {
    uint64_t launches, bytes;
} Amount;
typedef struct {
    char *name;
    Amount total, step, last; /* of the run, since the last mark, between the last two marks */
} OperatorCount;

bool recording;
static int requested;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t writer; /* the process that has the files open; a forked child opens its own */
static FILE *calls, *trace;
static OperatorCount counts[NAMES]; /* a hash table by name */
static uint64_t steps;

__attribute__((constructor)) static void read_settings(void) {
    const char *names = setting("NPU_EMULATOR_RECORD", "");
    requested = (strstr(names, "launches") ? LAUNCHES : 0) | (strstr(names, "log") ? LOG : 0) | (strstr(names, "trace") ? TRACE : 0);
    recording = requested;
    hold_during_fork(&lock);
}

static void path_of(char *path, const char *what) {
    snprintf(path, PATH_LENGTH, "%s/%s.%d", setting("NPU_EMULATOR_RECORD_FOLDER", "."), what, (int)getpid());
}

static FILE *open_lines(const char *what) {
    char path[PATH_LENGTH];
    path_of(path, what);
    FILE *file = fopen(path, "w");
    if (file) setvbuf(file, NULL, _IOLBF, 1 << 16); /* whole lines, also if the process is killed */
    return file;
}

/* Launches */

static void write_counts(void) {
    char path[PATH_LENGTH], temporary[PATH_LENGTH];
    path_of(path, "launches");
    path_of(temporary, "unfinished");
    FILE *file = fopen(temporary, "w");
    if (!file) return;
    fprintf(file, "{\"rank\": %s, \"steps\": %llu, \"operators\": {", setting("RANK", "null"), (unsigned long long)steps);
    const char *separator = "\n";
    for (OperatorCount *entry = counts; entry < counts + NAMES; entry++) {
        if (!entry->name) continue;
        fprintf(file, "%s\"%s\": {\"total\": [%llu, %llu], \"step\": [%llu, %llu]}", separator, entry->name, (unsigned long long)entry->total.launches,
                (unsigned long long)entry->total.bytes, (unsigned long long)entry->last.launches, (unsigned long long)entry->last.bytes);
        separator = ",\n";
    }
    fprintf(file, "}}\n");
    fclose(file);
    rename(temporary, path);
}

static void write_counts_at_exit(void) {
    if (writer == getpid()) write_counts();
}

static OperatorCount *entry_of(const char *name) {
    uint32_t hash = 2166136261u;
    for (const char *letter = name; *letter; letter++) hash = (hash ^ (unsigned char)*letter) * 16777619u;
    for (uint32_t i = 0; i < NAMES; i++) {
        OperatorCount *entry = &counts[(hash + i) % NAMES];
        if (!entry->name) entry->name = strdup(name);
        if (!strcmp(entry->name, name)) return entry;
    }
    return NULL;
}

static void add(Amount *to, uint64_t bytes) {
    to->launches++;
    to->bytes += bytes;
}

static void count(const Task *task, uint64_t bytes) {
    OperatorCount *entry = entry_of(task->name);
    if (!entry) return;
    add(&entry->total, bytes);
    add(&entry->step, bytes);
}

/* Log */

static uint64_t bytes_of_tensor(const Tensor *tensor) { /* an expanded dimension has one element */
    if (!tensor) return 0;
    uint64_t elements = 1;
    for (int i = 0; i < tensor->rank; i++) elements *= tensor->stride[i] || !tensor->shape[i] ? tensor->shape[i] : 1;
    return elements * dtype_size(tensor->dtype);
}

static uint64_t bytes_of_call(const Call *call) {
    uint64_t bytes = 0;
    for (int i = 0; i < call->count; i++) {
        const void *pointer = call->arguments[i].pointer;
        if (call->operator->types[i] == 't') bytes += bytes_of_tensor(pointer);
        if (call->operator->types[i] == 'T' && pointer)
            for (uint64_t k = 0; k < ((const List *)pointer)->length; k++) bytes += bytes_of_tensor((const Tensor *)((const List *)pointer)->items[k]);
    }
    return bytes;
}

static void write_numbers(FILE *to, const int64_t *numbers, int64_t length) {
    fputc('[', to);
    for (int64_t i = 0; i < length; i++) fprintf(to, "%s%lld", i ? ", " : "", (long long)numbers[i]);
    fputc(']', to);
}

static void write_real(FILE *to, double value) { /* JSON has no infinity */
    if (isfinite(value)) fprintf(to, "%.17g", value);
    else fprintf(to, "\"%s\"", isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

static void write_tensor(FILE *to, const Tensor *tensor) {
    if (!tensor) {
        fputs("null", to);
        return;
    }
    fprintf(to, "{\"dtype\": \"%s\", \"shape\": ", emulator_dtype_name(tensor->dtype));
    write_numbers(to, tensor->shape, tensor->rank);
    fputs(", \"strides\": ", to);
    write_numbers(to, tensor->stride, tensor->rank);
    fputc('}', to);
}

static void write_scalar(FILE *to, const Scalar *scalar) {
    if (!scalar) fputs("null", to);
    else if (scalar->dtype == ACL_FLOAT) write_real(to, *(const float *)scalar->value);
    else if (scalar->dtype == ACL_DOUBLE) write_real(to, *(const double *)scalar->value);
    else if (scalar->dtype == ACL_INT32) fprintf(to, "%d", *(const int32_t *)scalar->value);
    else if (scalar->dtype == ACL_INT64) fprintf(to, "%lld", (long long)*(const int64_t *)scalar->value);
    else if (scalar->dtype == ACL_BOOL) fputs(*scalar->value ? "true" : "false", to);
    else fprintf(to, "{\"dtype\": \"%s\"}", emulator_dtype_name(scalar->dtype));
}

static void write_list(FILE *to, char type, const void *from) {
    if (!from) {
        fputs("null", to);
        return;
    }
    uint64_t length = type == 'T' || type == 'S' ? ((const List *)from)->length : ((const Array *)from)->length;
    fputc('[', to);
    for (uint64_t i = 0; i < length; i++) {
        if (i) fputs(", ", to);
        if (type == 'T') write_tensor(to, (const Tensor *)((const List *)from)->items[i]);
        else if (type == 'S') write_scalar(to, (const Scalar *)((const List *)from)->items[i]);
        else if (type == 'I') fprintf(to, "%lld", (long long)((const int64_t *)((const Array *)from)->items)[i]);
        else if (type == 'F') write_real(to, ((const float *)((const Array *)from)->items)[i]);
        else fputs(((const bool *)((const Array *)from)->items)[i] ? "true" : "false", to);
    }
    fputc(']', to);
}

static void write_text(FILE *to, const char *text) {
    fputc('"', to);
    for (; *text; text++)
        if ((unsigned char)*text >= ' ' && *text != '"' && *text != '\\') fputc(*text, to);
    fputc('"', to);
}

static void write_argument(FILE *to, char type, Argument value) {
    if (type == 't') write_tensor(to, value.pointer);
    else if (type == 's') write_scalar(to, value.pointer);
    else if (strchr("TSIFB", type)) write_list(to, type, value.pointer);
    else if (type == 'd') write_real(to, value.real);
    else if (type == 'f') write_real(to, value.single);
    else if (type == '?') fputs(value.integer & 0xff ? "true" : "false", to);
    else if (type == 'z' && value.pointer) write_text(to, value.pointer);
    else if (strchr("zpo", type)) fputs("null", to);
    else fprintf(to, "%lld", (long long)value.integer);
}

static void write_arguments(FILE *to, const Call *call) {
    const char *name = call->operator->arguments; /* "self,other,alpha,out" */
    fputc('{', to);
    for (int i = 0; i < call->count; i++) {
        int length = (int)strcspn(name, ",");
        fprintf(to, "%s\"%.*s\": ", i ? ", " : "", length, name);
        write_argument(to, call->operator->types[i], call->arguments[i]);
        name += length + (name[length] == ',');
    }
    fputc('}', to);
}

static void write_call(const Task *task, uint64_t bytes, double end) {
    fprintf(calls, "{\"rank\": %s, \"process\": %d, \"step\": %llu, \"order\": %llu, \"operator\": \"%s\", \"stream\": %d, \"launched\": %.1f, "
                   "\"began\": %.1f, \"duration\": %.1f, \"bytes\": %llu",
            setting("RANK", "null"), (int)getpid(), (unsigned long long)task->training_step, (unsigned long long)task->order, task->name,
            task->stream, task->launched, task->began, end - task->began, (unsigned long long)bytes);
    if (task->category == OPERATOR) {
        fputs(", \"arguments\": ", calls);
        write_arguments(calls, (const Call *)task);
    }
    fputs("}\n", calls);
}

static void write_trace(const Task *task, uint64_t bytes, double end) {
    fprintf(trace, "{\"ph\": \"X\", \"name\": \"%s\", \"cat\": \"%s\", \"pid\": %d, \"tid\": %d, \"ts\": %.1f, \"dur\": %.1f, "
                   "\"args\": {\"launched\": %.1f, \"bytes\": %llu, \"step\": %llu}}\n",
            task->name, CATEGORIES[task->category], (int)getpid(), task->stream, task->began, end - task->began, task->launched,
            (unsigned long long)bytes, (unsigned long long)task->training_step);
}

/* The lock is held. */
static void open_files(void) {
    if (writer == getpid()) return;
    if (!writer && requested & LAUNCHES) atexit(write_counts_at_exit);
    writer = getpid();
    steps = 0;
    memset(counts, 0, sizeof counts);
    if (requested & LOG) calls = open_lines("calls");
    if (requested & TRACE) trace = open_lines("trace");
    if (trace)
        fprintf(trace, "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, \"args\": {\"name\": \"rank %s\"}}\n", (int)getpid(),
                setting("RANK", "0"));
}

static uint64_t bytes_of(const Task *task) { return task->category == OPERATOR ? bytes_of_call((const Call *)task) : task->bytes; }

/* A launch counts in the training step in which it is made, although it may run later. */
void record_launch(Task *task) {
    task->launched = microseconds_now();
    pthread_mutex_lock(&lock);
    open_files();
    task->training_step = steps;
    if (requested & LAUNCHES && task->category != CONTROL) count(task, bytes_of(task));
    pthread_mutex_unlock(&lock);
}

static void record(const Task *task, double end) {
    uint64_t bytes = bytes_of(task);
    pthread_mutex_lock(&lock);
    open_files();
    if (calls && task->category != CONTROL) write_call(task, bytes, end);
    if (trace) write_trace(task, bytes, end);
    pthread_mutex_unlock(&lock);
}

int recorded_step(Task *task) {
    if (!task->began) task->began = microseconds_now();
    int result = task->step(task);
    if (result != PENDING) record(task, microseconds_now());
    return result;
}

void emulator_mark_step(void) {
    pthread_mutex_lock(&lock);
    open_files();
    steps++;
    for (OperatorCount *entry = counts; entry < counts + NAMES; entry++) {
        entry->last = entry->step;
        entry->step = (Amount){0};
    }
    if (requested & LAUNCHES) write_counts(); /* also for a process that ends without its exit handlers */
    if (trace)
        fprintf(trace, "{\"ph\": \"i\", \"s\": \"g\", \"name\": \"step %llu\", \"pid\": %d, \"tid\": 0, \"ts\": %.1f}\n", (unsigned long long)steps,
                (int)getpid(), microseconds_now());
    pthread_mutex_unlock(&lock);
}

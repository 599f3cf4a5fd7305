/* What aclCreateTensor and its relatives return (arguments.c). */
#pragma once
#include "base.h"

#pragma GCC visibility push(hidden)
enum { MOST_DIMENSIONS = 8 };

typedef struct {
    uint32_t magic;
    int32_t references;
    char type; /* 't' tensor, 's' scalar, 'T' and 'S' lists of them, 'I' 'F' 'B' arrays of int64, float, bool */
} Object;
typedef struct {
    Object head;
    int32_t dtype, format;
    int32_t rank;   /* if it is above MOST_DIMENSIONS, no operator takes the tensor */
    int64_t offset; /* in elements */
    void *data;
    int64_t shape[MOST_DIMENSIONS], stride[MOST_DIMENSIONS];
} Tensor;
typedef struct {
    Object head;
    int32_t dtype;
    unsigned char value[16];
} Scalar;
typedef struct {
    Object head;
    uint64_t length;
    Object **items;
} List;
typedef struct {
    Object head;
    uint64_t length;
    void *items;
} Array;
enum { ACL_FLOAT = 0, ACL_FLOAT16 = 1, ACL_INT32 = 3, ACL_INT64 = 9, ACL_DOUBLE = 11, ACL_BOOL = 12, ACL_BF16 = 27 }; /* some of aclDataType */
size_t dtype_size(int dtype); /* 0: unknown */
EXPORTED const char *emulator_dtype_name(int dtype);
bool is_floating(int dtype);
char object_type(const void *pointer); /* 0: the pointer is no live object */
void retain(void *pointer);
void release(void *pointer);
#pragma GCC visibility pop

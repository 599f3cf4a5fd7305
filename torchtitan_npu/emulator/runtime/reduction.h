/* Reductions of HCCL, and the dtypes that a chip supports (reduction.c). */
#pragma once
#include "base.h"

#pragma GCC visibility push(hidden)
enum { HCCL_SUM, HCCL_PROD, HCCL_MAX, HCCL_MIN, HCCL_OPS };
enum { INT8, INT16, INT32, FLOAT16, FLOAT32, INT64, UINT64, UINT8, UINT16, UINT32, FLOAT64, BFLOAT16, HIF8 = 14, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT8_E8M0, HCCL_DTYPES };

extern const uint8_t DTYPE_SIZE[HCCL_DTYPES];
extern const char *const OP_NAMES[HCCL_OPS];
bool chip_moves(int dtype);
bool chip_reduces(int dtype, int op);
void reduce(void *to, const void *const *from, uint32_t ranks, uint64_t count, int dtype, int op);
#pragma GCC visibility pop

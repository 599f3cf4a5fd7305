/* Reductions of HCCL, and the dtypes that a chip supports.
 *
 * Ranks are combined in their order, 0 first. float16 and bfloat16 are accumulated in float32 and rounded once, at the
 * end; every other dtype is accumulated in itself. Integers wrap around. The order of the hardware depends on its
 * topology, so the last bits of a sum may differ from a device's.
 */
#include "reduction.h"
#include "device.h"
#include <string.h>

enum { BLOCK = 1024 };

const uint8_t DTYPE_SIZE[HCCL_DTYPES] = {[INT8] = 1, [INT16] = 2, [INT32] = 4, [FLOAT16] = 2, [FLOAT32] = 4, [INT64] = 8,
    [UINT64] = 8, [UINT8] = 1, [UINT16] = 2, [UINT32] = 4, [FLOAT64] = 8, [BFLOAT16] = 2, [HIF8] = 1, [FLOAT8_E4M3] = 1,
    [FLOAT8_E5M2] = 1, [FLOAT8_E8M0] = 1};
const char *const OP_NAMES[HCCL_OPS] = {"sum", "prod", "max", "min"};

/* Documented limits: docs/zh/api_ref/comm_op_interface of hicann/hccl. */

static bool is_950(void) { return !strncmp(aclrtGetSocName(), "Ascend950", strlen("Ascend950")); }

bool chip_moves(int dtype) {
    return dtype >= 0 && dtype < HCCL_DTYPES && DTYPE_SIZE[dtype] && (dtype < HIF8 || is_950());
}

bool chip_reduces(int dtype, int op) {
    if (op < 0 || op >= HCCL_OPS) return false;
    switch (dtype) {
    case INT16: case BFLOAT16: return op != HCCL_PROD;
    case INT8: case INT32: case INT64: case FLOAT16: case FLOAT32: return true;
    case UINT64: case FLOAT64: return is_950();
    default: return false;
    }
}

static float from_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float value;
    if (rest >= 0x7c00) wide = sign | 0x7f800000 | (rest & 0x3ff) << 13; /* infinity, NaN */
    else if (rest >= 0x400) wide = sign | ((rest << 13) + (112u << 23));
    else {
        value = (float)rest / (1 << 24); /* subnormal */
        return sign ? -value : value;
    }
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;  /* NaN */
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and above round to infinity */
    if (bits < 0x38800000) {                      /* subnormal: adding 0.5 rounds at its last bit, 2^-24 */
        float magnitude, half = 0.5f;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += half;
        memcpy(&bits, &magnitude, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - (112u << 23)) >> 13);
}

/* Combine `count` elements of type T; sums and products in U, which is unsigned for integers: overflow is defined. */
#define COMBINE(T, U)                                                                                    \
    static void combine_##T(T *to, const T *from, uint64_t count, int op) {                              \
        switch (op) {                                                                                    \
        case HCCL_SUM: for (uint64_t i = 0; i < count; i++) to[i] = (T)((U)to[i] + (U)from[i]); break;   \
        case HCCL_PROD: for (uint64_t i = 0; i < count; i++) to[i] = (T)((U)to[i] * (U)from[i]); break;  \
        case HCCL_MAX: for (uint64_t i = 0; i < count; i++) to[i] = to[i] > from[i] ? to[i] : from[i]; break; \
        default: for (uint64_t i = 0; i < count; i++) to[i] = to[i] < from[i] ? to[i] : from[i];         \
        }                                                                                                \
    }
COMBINE(int8_t, uint32_t)
COMBINE(int16_t, uint32_t)
COMBINE(int32_t, uint32_t)
COMBINE(int64_t, uint64_t)
COMBINE(uint64_t, uint64_t)
COMBINE(float, float)
COMBINE(double, double)

static void combine(void *to, const void *from, uint64_t count, int dtype, int op) {
    switch (dtype) {
    case INT8: combine_int8_t(to, from, count, op); break;
    case INT16: combine_int16_t(to, from, count, op); break;
    case INT32: combine_int32_t(to, from, count, op); break;
    case INT64: combine_int64_t(to, from, count, op); break;
    case UINT64: combine_uint64_t(to, from, count, op); break;
    case FLOAT32: combine_float(to, from, count, op); break;
    case FLOAT64: combine_double(to, from, count, op); break;
    }
}

static void reduce_narrow(uint16_t *to, const void *const *from, uint32_t ranks, uint64_t count, int dtype, int op) {
    float (*widen)(uint16_t) = dtype == FLOAT16 ? from_half : from_bfloat;
    uint16_t (*narrow)(float) = dtype == FLOAT16 ? to_half : to_bfloat;
    float sum[BLOCK], next[BLOCK];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t length = count - at < BLOCK ? count - at : BLOCK;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const uint16_t *source = (const uint16_t *)from[rank] + at;
            float *wide = rank ? next : sum;
            for (uint64_t i = 0; i < length; i++) wide[i] = widen(source[i]);
            if (rank) combine_float(sum, next, length, op);
        }
        for (uint64_t i = 0; i < length; i++) to[at + i] = narrow(sum[i]);
    }
}

void reduce(void *to, const void *const *from, uint32_t ranks, uint64_t count, int dtype, int op) {
    if (dtype == FLOAT16 || dtype == BFLOAT16) {
        reduce_narrow(to, from, ranks, count, dtype, op);
        return;
    }
    memcpy(to, from[0], count * DTYPE_SIZE[dtype]);
    for (uint32_t rank = 1; rank < ranks; rank++) combine(to, from[rank], count, dtype, op);
}

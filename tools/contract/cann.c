/* Stub of CANN: the functions that torch_npu needs to load, to find devices and to allocate memory.
 *
 * build_stubs.py compiles this file together with a function that returns 0 ("success", or a null pointer) for every
 * other symbol of CANN. This file has only the functions that cannot return 0: those whose results torch_npu reads, and
 * launches. A launch must fail, because the stub computes no output.
 *
 * The simulated machine is set by environment variables:
 *   STUB_SOC        the chip, Ascend910B3 by default
 *   STUB_NPU_COUNT  devices of this host, 8 by default; at least 1, or torch's autograd engine aborts
 *   STUB_CANN       CANN's version, 9.2.0 by default
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 207001, NOT_SUPPORTED = 500001 };
enum { ALIGNMENT = 512, VERSION_FIELD = 128 };

static const char *setting(const char *name, const char *fallback) {
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}

/* Devices */

static __thread int32_t current_device;

const char *aclrtGetSocName(void) { return setting("STUB_SOC", "Ascend910B3"); }

int aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)atoi(setting("STUB_NPU_COUNT", "8"));
    return SUCCESS;
}

int aclrtSetDevice(int32_t device) {
    current_device = device;
    return SUCCESS;
}

int aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return SUCCESS;
}

int aclrtDeviceCanAccessPeer(int32_t *can_access, int32_t device, int32_t peer) {
    *can_access = 0;
    return SUCCESS;
}

int aclGetDeviceCapability(uint32_t device, int information, int64_t *value) {
    *value = 24; /* cores */
    return SUCCESS;
}

int aclsysGetCANNVersion(int package, char *version) {
    memset(version, 0, VERSION_FIELD);
    strncpy(version, setting("STUB_CANN", "9.2.0"), VERSION_FIELD - 1);
    return SUCCESS;
}

int aclsysGetVersionStr(const char *package, char *version) { return aclsysGetCANNVersion(0, version); }

const char *aclGetRecentErrMsg(void) { return "this is the stub of CANN: there is no device"; }

/* Handles: torch_npu stores them and passes them back; any address that is not null will do. */

static char handle;

static int give_handle(void **out) {
    *out = &handle;
    return SUCCESS;
}

int aclrtGetCurrentContext(void **context) { return give_handle(context); }
int aclrtCreateStream(void **stream) { return give_handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return give_handle(stream); }
int aclrtDestroyStreamForce(void *stream) { return SUCCESS; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return give_handle(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return give_handle(event); }

/* Arguments of operators. Their contents are not needed, because no operator runs. */
void *aclCreateTensor(void) { return &handle; }
void *aclCreateTensorList(void) { return &handle; }
void *aclCreateScalar(void) { return &handle; }
void *aclCreateScalarList(void) { return &handle; }
void *aclCreateIntArray(void) { return &handle; }
void *aclCreateFloatArray(void) { return &handle; }
void *aclCreateBoolArray(void) { return &handle; }
int aclDestroyTensor(void *tensor) { return SUCCESS; }
int aclDestroyTensorList(void *tensors) { return SUCCESS; }
int aclDestroyScalar(void *scalar) { return SUCCESS; }
int aclDestroyScalarList(void *scalars) { return SUCCESS; }
int aclDestroyIntArray(void *array) { return SUCCESS; }
int aclDestroyFloatArray(void *array) { return SUCCESS; }
int aclDestroyBoolArray(void *array) { return SUCCESS; }

int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = 0;
    return SUCCESS;
}

/* Memory: host memory, so that npu tensors exist and torch_npu's argument checks can run. */

static int allocate(void **pointer, size_t size) {
    return posix_memalign(pointer, ALIGNMENT, size ? size : ALIGNMENT) ? OUT_OF_MEMORY : SUCCESS;
}

static int release(void *pointer) {
    free(pointer);
    return SUCCESS;
}

int aclrtMalloc(void **pointer, size_t size, int policy) { return allocate(pointer, size); }
int aclrtMallocHost(void **pointer, size_t size) { return allocate(pointer, size); }
int aclrtFree(void *pointer) { return release(pointer); }
int aclrtFreeHost(void *pointer) { return release(pointer); }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int direction) {
    memcpy(to, from, size);
    return SUCCESS;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int direction, void *stream) {
    return aclrtMemcpy(to, room, from, size, direction);
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    memset(to, value, size);
    return SUCCESS;
}

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = (size_t)64 << 30;
    return SUCCESS;
}

/* Options: stored, because torch_npu reads them back. */

enum { OPTIONS = 64 };
static int64_t options[OPTIONS];

int aclrtSetSysParamOpt(int option, int64_t value) {
    options[option % OPTIONS] = value;
    return SUCCESS;
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = options[option % OPTIONS];
    return SUCCESS;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return SUCCESS; }
int aclrtSetDeviceSatMode(int mode) { return SUCCESS; }
int aclSetCompileopt(int option, const char *value) { return SUCCESS; }

/* torch_npu reads whether operators are compiled just in time. This chip has precompiled operators. */
static const char compile_option[] = "disable";

size_t aclGetCompileoptSize(int option) { return sizeof compile_option; }

int aclGetCompileopt(int option, char *value, size_t size) {
    strncpy(value, compile_option, size);
    return SUCCESS;
}

/* Launches: there is no device. */

int aclopCompileAndExecute(void) { return NOT_SUPPORTED; }
int rtKernelLaunch(void) { return NOT_SUPPORTED; }

/* Devices, versions and options: what torch_npu asks when it starts. */
#include "runtime.h"
#include <stdio.h>
#include <string.h>

enum { VERSION_LENGTH = 128, OPTIONS = 64 };

static const char *chip;
static uint32_t devices;

__attribute__((constructor)) static void read_settings(void) {
    chip = strdup(setting("NPU_EMULATOR_CHIP", "Ascend910B3"));
    devices = (uint32_t)setting_number("NPU_EMULATOR_DEVICES", 8);
}

const char *aclrtGetSocName(void) { return chip; }

int aclrtGetDeviceCount(uint32_t *count) {
    *count = devices;
    return ACL_SUCCESS;
}

int aclrtDeviceCanAccessPeer(int32_t *can_access, int32_t device, int32_t peer) {
    *can_access = 0;
    return ACL_SUCCESS;
}

int aclGetDeviceCapability(uint32_t device, int attribute, int64_t *value) {
    *value = 24; /* cores */
    return ACL_SUCCESS;
}

extern const char cann_version[]; /* defined by build.py */

int aclsysGetCANNVersion(int package, char *version) {
    memset(version, 0, VERSION_LENGTH);
    strncpy(version, cann_version, VERSION_LENGTH - 1);
    return ACL_SUCCESS;
}

int aclsysGetVersionStr(const char *package, char *version) { return aclsysGetCANNVersion(0, version); }

/* A handle that torch_npu keeps and passes back. */
static char context;
int aclrtGetCurrentContext(void **out) {
    *out = &context;
    return ACL_SUCCESS;
}

/* Options are stored, because torch_npu reads them back. */
static int64_t options[OPTIONS];

int aclrtSetSysParamOpt(int option, int64_t value) {
    options[option % OPTIONS] = value;
    return ACL_SUCCESS;
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = options[option % OPTIONS];
    return ACL_SUCCESS;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

/* torch_npu reads whether operators are compiled just in time. This chip has precompiled operators. */
static const char compile_option[] = "disable";

size_t aclGetCompileoptSize(int option) { return sizeof compile_option; }

int aclGetCompileopt(int option, char *value, size_t size) {
    strncpy(value, compile_option, size);
    return ACL_SUCCESS;
}

/* Start and end of CANN, devices and contexts: there is nothing to set up or to release. */
int aclInit(const char *configuration) { return ACL_SUCCESS; }
int aclFinalize(void) { return ACL_SUCCESS; }
int aclrtResetDevice(int32_t device) { return ACL_SUCCESS; }
int aclrtSetCurrentContext(void *context) { return ACL_SUCCESS; }

/* A line for CANN's log, which does not exist here. */
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {}

/* Looked up by name when torch_npu starts; without effect here. */
int aclrtSetOpWaitTimeout(uint32_t seconds) { return ACL_SUCCESS; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return ACL_SUCCESS; }
int aclrtSetStreamAttribute(void *stream, int attribute, void *value) { return ACL_SUCCESS; }
int aclrtGetLastError(int level) { return ACL_SUCCESS; }
int aclrtPeekAtLastError(int level) { return ACL_SUCCESS; }
int aclrtDeviceTaskAbort(int32_t device, uint32_t timeout) { return ACL_SUCCESS; }
int aclrtSetDeviceSatMode(int mode) { return ACL_SUCCESS; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return ACL_SUCCESS; }
int aclSetCompileopt(int option, const char *value) { return ACL_SUCCESS; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) { return ACL_SUCCESS; } /* of the 910, whose overflows saturate */

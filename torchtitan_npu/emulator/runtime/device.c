/* Devices, versions and options: what torch_npu asks when it starts. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
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

static __thread int32_t current_device;

/* Whether torch_npu's allocator reports its blocks: the library that it looks for is preloaded (build.py). */
static bool blocks_are_reported(void) { return dlsym(RTLD_DEFAULT, "emulator_memory_tool"); }

int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= (int32_t)devices || device >= DEVICES) {
        set_message("there is no device %d: the emulated machine has %u", device, devices);
        return ACL_ERROR_RT_INVALID_DEVICE;
    }
    if (setting_number("NPU_EMULATOR_SEED", 0) && !blocks_are_reported()) {
        set_message("NPU_EMULATOR_SEED needs libascend_kernel_hook.so in LD_PRELOAD: start the program with torchtitan-npu emulate --seed");
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
    if (setting_number("TASK_QUEUE_ENABLE", 1) && !dlsym(RTLD_DEFAULT, "emulator_task_queue")) { /* 1 is torch_npu's default */
        set_message("TASK_QUEUE_ENABLE=%s needs libemulator_task_queue.so in LD_PRELOAD: set it before torchtitan-npu emulate",
                    setting("TASK_QUEUE_ENABLE", "1"));
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    }
    current_device = device;
    return ACL_SUCCESS;
}

int aclrtGetDevice(int32_t *device) {
    *device = current_device;
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

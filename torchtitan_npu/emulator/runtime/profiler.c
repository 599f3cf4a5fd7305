/* CANN's profiler, which torch_npu opens by name. It collects nothing: a profile has the host's side only. */
#include "base.h"

static char config;

int aclprofInit(const char *folder, size_t length) { return ACL_SUCCESS; }
void *aclprofCreateConfig(uint32_t *devices, uint32_t count, int metrics, const void *events, uint64_t data) { return &config; }
int aclprofSetConfig(int option, const char *value, size_t length) { return ACL_SUCCESS; }
int aclprofWarmup(const void *configuration) { return ACL_SUCCESS; }
int aclprofStart(const void *configuration) { return ACL_SUCCESS; }
int aclprofStop(const void *configuration) { return ACL_SUCCESS; }
int aclprofDestroyConfig(const void *configuration) { return ACL_SUCCESS; }
int aclprofFinalize(void) { return ACL_SUCCESS; }

/* The driver's version: too old for timestamps of the device's own counter. */
int halGetAPIVersion(int *version) {
    *version = 0;
    return ACL_SUCCESS;
}

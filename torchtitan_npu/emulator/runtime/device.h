/* The emulated devices (device.c), and how many of their bytes are in use (device_memory.c). */
#pragma once
#include "base.h"

#pragma GCC visibility push(hidden)
enum { DEVICES = 64 };

EXPORTED const char *aclrtGetSocName(void); /* the chip */
EXPORTED int aclrtGetDevice(int32_t *device);
EXPORTED int aclrtSetDevice(int32_t device);

int charge_device(int device, size_t bytes); /* an error code if the device has not as many left */
void discharge_device(int device, size_t bytes);
void device_memory(int device, size_t *left, size_t *all);
#pragma GCC visibility pop

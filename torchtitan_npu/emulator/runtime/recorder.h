/* A record of every task (recorder.c). */
#pragma once
#include "calls.h"

#pragma GCC visibility push(hidden)
extern bool recording;
void record_launch(Task *task);
int recorded_step(Task *task);          /* run the step and record the task when it has ended */
EXPORTED void emulator_mark_step(void); /* a training step has ended */
#pragma GCC visibility pop

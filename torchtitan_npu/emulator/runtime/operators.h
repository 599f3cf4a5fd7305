/* Calls of operators (operators.c). The generated functions and bridge.c use these. */
#pragma once
#include "calls.h"

#pragma GCC visibility push(hidden)
EXPORTED int emulator_prepare_call(Operator *operator, const Argument *arguments, int count, uint64_t *workspace, void **executor);
EXPORTED int emulator_launch_call(void *executor, void *stream);
EXPORTED uint64_t emulator_prepared_calls(void); /* calls that were prepared and neither launched nor freed; for tests */

/* The Python side (bridge.c) sets these when it is imported. */
typedef struct {
    int (*run)(Call *);                            /* compute; an error code */
    const void *(*find_check)(Operator *operator); /* NULL: the operator has no check */
    int (*check)(Call *, uint64_t *workspace);     /* refuse arguments, state the workspace */
} PythonSide;
EXPORTED void emulator_set_python_side(const PythonSide *side);
#pragma GCC visibility pop

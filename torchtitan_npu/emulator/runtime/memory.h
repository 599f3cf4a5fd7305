/* Memory that the program has allocated (allocator.c), and what moves and poisons it (copies.c). */
#pragma once
#include "streams.h"

#pragma GCC visibility push(hidden)
bool is_registered(const void *address); /* device memory, or pinned memory of the host */
bool first_use(const void *address, char **from, size_t *size); /* find the block of the address; false if it was used before */

void poison_if_fresh(const void *address, Stream *stream);
#pragma GCC visibility pop

/* Locks in a forked child. fork() copies memory as it is, also while another thread changes it under a lock. So the thread
 * that forks takes every lock first, and parent and child release them. No thread takes two of these locks otherwise. */
#include "base.h"
#include <stdio.h>

enum { MOST_LOCKS = 16 };
static pthread_mutex_t *locks[MOST_LOCKS];
static int count;

static void take_locks(void) {
    for (int i = 0; i < count; i++) pthread_mutex_lock(locks[i]);
}

static void release_locks(void) {
    for (int i = count - 1; i >= 0; i--) pthread_mutex_unlock(locks[i]);
}

void hold_during_fork(pthread_mutex_t *lock) {
    if (!count) pthread_atfork(take_locks, release_locks, release_locks);
    if (count == MOST_LOCKS) {
        fprintf(stderr, "emulator: more than %d locks; raise MOST_LOCKS in runtime/fork.c\n", MOST_LOCKS);
        abort();
    }
    locks[count++] = lock;
}

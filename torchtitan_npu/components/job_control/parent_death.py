"""End this process when torchrun ends, so that no rank outlives its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_torchrun() -> None:
    """Let Linux kill this process when its parent process ends, in whatever way, if that is torchrun.

    Ranks without a launcher would hold their devices and write into the checkpoints of the next launch. A process that
    a shell has started may outlive it (``nohup``). Linux sends the signal when the parent's thread that created this
    process ends: torchrun starts its ranks in its main thread.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)

"""The entry, launched by torchrun:

    torchrun --nproc_per_node=N -m torchtitan_npu.train --job.config_file X.toml [--section.key value ...]

It takes TorchTitan's options and those of this package.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from typing import NoReturn

from torchtitan_npu import platform
from torchtitan_npu.errors import ERROR_PREFIX, EXIT_USAGE, UsageError, one_line

platform.prepare()

from torchtitan.tools.logging import init_logger  # noqa: E402

from torchtitan_npu.components.job_control.process import end_with_torchrun  # noqa: E402
from torchtitan_npu.config.parser import JobConfigManager, import_module  # noqa: E402
from torchtitan_npu.preflight.files import check_checkpoint_files  # noqa: E402
from torchtitan_npu.preflight.job import check_job, check_start  # noqa: E402
from torchtitan_npu.trainer import train  # noqa: E402

IS_LOCAL_RANK_0 = os.environ.get("LOCAL_RANK", "0") == "0"
"""Every rank finds the same configuration error; only local rank 0 prints it."""
ERROR_DELAY_S = 20
"""Other ranks sleep this long after a configuration error, so that rank 0's message is printed before torchrun kills
the group."""


def main() -> None:
    init_logger()
    try:
        config = JobConfigManager().parse_args()
        if config.experimental.custom_import:  # before the checks: it may register models and converters
            import_module("experimental.custom_import", config.experimental.custom_import)
        job = check_job(config, world_size(config.comm.mode))
        check_start(job)
        if IS_LOCAL_RANK_0 and config.comm.mode == "default":
            check_checkpoint_files(job)
        train(config)
    except UsageError as error:
        wait_for_local_rank_0()  # a rank that survives the wait is the only one with this error, and prints it
        print(f"{ERROR_PREFIX}{one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def world_size(mode: str) -> int:
    """Return the number of ranks. Without real communication, TorchTitan takes it from NGPU."""
    if mode == "default":
        return int(os.environ.get("WORLD_SIZE", "1"))
    if not (ranks := os.environ.get("NGPU", "")).isdecimal() or int(ranks) < 1:
        raise UsageError(
            f"comm.mode {mode!r} needs the environment variable NGPU, the number of ranks; it is {ranks!r}"
        )
    return int(ranks)


def wait_for_local_rank_0() -> None:
    if not IS_LOCAL_RANK_0:
        time.sleep(ERROR_DELAY_S)


def run() -> NoReturn:
    """Run a job in this process, and end the process."""
    faulthandler.enable()
    end_with_torchrun()
    try:
        main()
    except SystemExit as ended:
        if ended.code:  # end at once: the destructors of process groups may wait for ranks that have ended
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1)
    sys.exit()


if __name__ == "__main__":
    run()

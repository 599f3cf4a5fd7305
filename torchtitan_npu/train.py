"""The entry, launched by torchrun:

    torchrun --nproc_per_node=N -m torchtitan_npu.train --job.config_file X.toml [--section.key value ...]

It takes TorchTitan's options and those of this package.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import closing
from typing import NoReturn

from torchtitan_npu import platform
from torchtitan_npu.errors import (
    ERROR_PREFIX,
    EXIT_FAILED,
    EXIT_NONFINITE,
    EXIT_STOPPED,
    EXIT_USAGE,
    UsageError,
    one_line,
)

platform.prepare()

import torch  # noqa: E402
from torchtitan.tools.logging import init_logger, logger  # noqa: E402

from torchtitan_npu.compile import passes as graph_passes  # noqa: E402
from torchtitan_npu.components.job_control.process import end_with_torchrun  # noqa: E402
from torchtitan_npu.components.job_control.rank_monitor import RankMonitor, start_monitor  # noqa: E402
from torchtitan_npu.components.nonfinite.checked_steps import NonfiniteStop  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.config.parser import load_job  # noqa: E402
from torchtitan_npu.log import log_on_first_rank  # noqa: E402
from torchtitan_npu.preflight.files import check_checkpoint_files  # noqa: E402
from torchtitan_npu.preflight.job import check_job, check_start  # noqa: E402
from torchtitan_npu.trainer import JobStopped, Trainer  # noqa: E402

IS_LOCAL_RANK_0 = os.environ.get("LOCAL_RANK", "0") == "0"
"""Every rank finds the same configuration error; only local rank 0 prints it."""
ERROR_DELAY_S = 20
"""Other ranks sleep this long after a configuration error, so that rank 0's message is printed before torchrun kills
the group."""


def main() -> None:
    init_logger()
    try:
        config = load_job()
        job = check_job(config, world_size(config.comm.mode))
        check_start(job)
        if IS_LOCAL_RANK_0 and config.comm.mode == "default":
            check_checkpoint_files(job)
        train(config)
    except UsageError as error:
        wait_for_local_rank_0()  # a rank that survives the wait is the only one with this error, and prints it
        print(f"{ERROR_PREFIX}{one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def train(config: JobConfig) -> None:
    """Run a job, or write its seed checkpoint. Name the first rank that fails, on every rank.

    Raise ``SystemExit`` after a failure, which has then been printed, and :class:`JobStopped` after a stop signal.
    After a step that is not finite, raise :class:`NonfiniteStop`.
    """
    monitor = start_monitor(config.comm)
    if monitor:
        with closing(monitor):
            _train_monitored(config, monitor)
    else:
        _train(config)
    torch.distributed.destroy_process_group()


def _train_monitored(config: JobConfig, monitor: RankMonitor) -> None:
    try:
        _train(config, monitor)
        monitor.finish()
    except JobStopped as stopped:
        message = f"Stopped by {monitor.stop_reason} {stopped.message}"
        monitor.finish_stop(message, EXIT_STOPPED)
        log_on_first_rank(message)
        raise
    except NonfiniteStop as stopped:
        monitor.finish_stop(stopped.report, EXIT_NONFINITE)
        raise
    except UsageError as error:
        if monitor.progress.step == 0:  # before training, all ranks raise it alike, and the entry prints it once
            raise
        monitor.report(error)
        raise SystemExit(EXIT_USAGE) from error
    except (Exception, SystemExit) as error:  # a rank that exits early has failed, whatever its exit code
        monitor.report(error)
        raise SystemExit(EXIT_FAILED) from error


def _train(config: JobConfig, monitor: RankMonitor | None = None) -> None:
    trainer = Trainer(config)
    try:
        if config.comm.mode == "local_tensor":
            logger.info("Local tensor mode enabled - skipping training execution")  # as TorchTitan does
        elif config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            if monitor:
                trainer.progress = monitor.progress
                monitor.watch_signals()
            trainer.train()
            if not trainer.has_finished:  # torch's ``record`` around TorchTitan's loop returns after sys.exit(0)
                raise RuntimeError(f"sys.exit(0) was called before step {config.training.steps}, the last one")
            graph_passes.report(trainer.model_parts)  # graphs compiled by the validation after the last step
    except RuntimeError as failure:
        if error := usage_error(failure):
            raise error from None
        raise
    finally:
        trainer.close()


def usage_error(failure: BaseException | None) -> UsageError | None:
    """Return the error of this package's backend or graph passes, which torch.compile and pipeline stages wrap."""
    while failure is not None:
        if isinstance(failure, UsageError):
            return failure
        failure = getattr(failure, "inner_exception", failure.__cause__)  # of an error in a backend of torch.compile
    return None


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

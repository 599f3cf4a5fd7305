"""What tools/launch.sh runs: torchrun with an environment profile, one log a rank, and who failed first.

What is asked for is in the environment (docs/how-to/launch.md); the arguments go to torchtitan_npu.train. Exit code 0:
trained, 1: a rank failed, 2: not started, 128 and a signal's number: ended by it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun handles."""


def refuse(why: object) -> NoReturn:
    """Nothing was started: say why, in one line."""
    print(f"launch: error: {why}", file=sys.stderr)
    sys.exit(2)


def refuse_without(missing: ModuleNotFoundError) -> NoReturn:
    refuse(f"{sys.executable} has no {missing.name}: see docs/how-to/install.md")


try:
    from torchtitan_npu.cli.launch import profile
    from torchtitan_npu.cli.launch.asked import Asked, asked
    from torchtitan_npu.cli.launch.failures import describe, failures_of, gather_reports, report_path, write_report
    from torchtitan_npu.errors import UsageError
except ModuleNotFoundError as missing:
    refuse_without(missing)


def main(argv: list[str]) -> int:
    for number in SIGNALS:  # until torchrun runs
        signal.signal(number, interrupt)
    try:
        wanted = asked(os.environ)
        folder = prepare_logs(wanted)
        try:
            from torchtitan_npu import platform  # with torch, which takes its time: mistakes are told before
        except ModuleNotFoundError as missing:
            refuse_without(missing)
        prepare_environment(wanted.profile or platform.backend())
        return launch(wanted, folder, argv)
    except UsageError as error:
        refuse(error)
    except KeyboardInterrupt as ended:
        (number,) = ended.args
        print(f"launch: ended by {number.name}", file=sys.stderr)
        return 128 + number  # as a shell says it


def interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number))


def note_signals() -> list[signal.Signals]:
    """From now on signals interrupt nothing; those that come are in the list."""
    noted: list[signal.Signals] = []
    for number in SIGNALS:
        signal.signal(number, lambda came, _: noted.append(signal.Signals(came)))
    return noted


def prepare_logs(args: Asked) -> Path:
    """Make a folder for this node's logs of this launch, and return it; an earlier launch's report is removed."""
    node = args.logs / f"node{args.node}"
    try:
        node.mkdir(parents=True, exist_ok=True)
        report_path(args.logs, args.node).unlink(missing_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d_%H%M%S_"), dir=node))
    except OSError as error:
        raise UsageError(f"LOGS={args.logs}: {error.strerror}: {error.filename}") from error


def prepare_environment(name: str) -> None:
    """Add the profile to this process's environment, which the ranks inherit, and say what it added."""
    added = profile.apply(name, os.environ)
    kept = [variable.name for variable in profile.read(name) if variable.name not in added]
    print(f"launch: profile {name}: {' '.join(f'{k}={v}' for k, v in added.items()) or 'nothing to add'}")
    if kept:
        print(f"launch: kept as you set it: {' '.join(f'{k}={os.environ[k]}' for k in kept)}")
    os.environ |= added


def launch(args: Asked, folder: Path, job: list[str]) -> int:
    """Run the job on this node, and explain its end; return the exit code.

    Raise ``KeyboardInterrupt``, as :func:`interrupt` does, where a signal ended it.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from torchtitan_npu.cli.launch.console import WithholdErrors

    started = time.time()
    print(f"launch: logs of this node's ranks: {folder}", flush=True)
    # what it logs when a rank fails is said below, in the right order
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    out, err = WithholdErrors(sys.stdout), WithholdErrors(sys.stderr)
    described = False
    try:
        with redirect_stdout(out), redirect_stderr(err):
            failed = run_ranks(torchrun_arguments(args, folder, job))
        signals = note_signals()  # torchrun's handlers stay, and would raise in the middle of the report
        if failed is None:
            return 0
        out.hold()  # other nodes may report later than an error waits
        err.hold()
        failures = failures_of(failed, args.node, folder)
        write_report(args.logs, args.node, failures)
        others = [node for node in range(args.nodes) if node != args.node]
        reports = {args.node: failures} | gather_reports(args.logs, others, started, signals)
        print(describe(reports, args.nodes), file=sys.stderr, flush=True)
        described = True
        if signals:
            raise KeyboardInterrupt(signals[0])
        return 1
    except SignalException as ended:  # torchrun has ended the ranks; what they said of it is released before it is told
        raise KeyboardInterrupt(ended.sigval) from None
    except (RendezvousError, DistError) as error:
        print(f"launch: error: {did_not_meet(args, error)}", file=sys.stderr)
        return 2
    finally:
        for stream in (out, err):
            stream.release(drop=described)  # rank 0's error is in the report, or followed from another's


def run_ranks(arguments: list[str]) -> ChildFailedError | None:
    """Run torchrun until this node's ranks have ended; return which of them failed."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = torchrun.parse_args(arguments)
    # While the nodes meet, torchrun waits in C++ for up to 15 minutes, and no handler of Python's would run: a signal
    # ends the process itself. When torchrun starts the ranks it sets its own handlers, which end them.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        return error
    return None


def did_not_meet(args: Asked, error: Exception) -> str:
    """Why the launchers of the nodes did not find each other, and what to look at; torch's own text goes on."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = f"MASTER_ADDR={args.master} MASTER_PORT={args.port}"
    if args.nodes == 1:
        return f"torchrun did not start: {text}"
    advice = "is another launch there, or is the address not this node's?"
    if args.node > 0:
        advice = "does node 0 run, and is it reached from here?"
    return f"the {args.nodes} nodes did not meet at {where}: {text} ({advice})"


def torchrun_arguments(args: Asked, folder: Path, job: list[str]) -> list[str]:
    import torch

    from torchtitan_npu import platform

    nproc = args.nproc or (
        1 if platform.backend() == "cpu" else torch.get_device_module(platform.backend()).device_count()
    )
    nodes = ["--standalone"]
    if args.nodes > 1:
        nodes = [f"--nnodes={args.nodes}", f"--node_rank={args.node}"]
        nodes += [f"--master_addr={args.master}", f"--master_port={args.port}"]
    # rank 0 on the console; the others in their files
    show = ["--tee=3", "--local_ranks_filter=0"] if args.node == 0 else ["--redirects=3"]
    return [
        *nodes,
        f"--nproc_per_node={nproc}",
        "--role=rank",
        f"--log_dir={folder}",
        *show,
        "-m",
        "torchtitan_npu.train",
        *job,
    ]

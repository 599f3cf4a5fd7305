"""Start a training job with torchrun, an environment profile and one log per rank. Report the first failure first.

    [PROFILE=npu] [NPROC=8] torchtitan-npu launch --job.config_file X.toml [--section.key value ...]
    NNODES=8 NODE_RANK=0 MASTER_ADDR=host0 torchtitan-npu launch ...      # on each node, NODE_RANK from 0 to 7

Options are environment variables, listed in docs/how-to/launch.md. All arguments go to torchtitan_npu.train.
Exit code 0: the job succeeded, 1: a rank failed, 2: not started, 75: stopped by a signal after a complete step,
128 + N: ended by signal N.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.doctor.environment import SELECTORS, addresses, interface_towards
from torchtitan_npu.cli.launch import environment_profile as profile
from torchtitan_npu.cli.launch.failure_report import (
    describe,
    failures_of,
    gather_reports,
    refusal,
    report_path,
    stop_message,
    write_report,
)
from torchtitan_npu.errors import EXIT_USAGE, UsageError


@dataclass(frozen=True)
class LaunchOptions:
    """Hold NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC, PROFILE and LOGS."""

    nodes: int
    node: int
    master: str
    port: int
    nproc: int
    """0 means one rank per device."""
    profile: str
    """Empty means the profile of the backend."""
    logs: Path


def read_options(environment: Mapping[str, str]) -> LaunchOptions:
    """Read and check the options. Raise :class:`UsageError` for an invalid or missing one."""
    options = LaunchOptions(
        nodes=_number("NNODES", 1, environment),
        node=_number("NODE_RANK", 0, environment),
        master=environment.get("MASTER_ADDR", ""),
        port=_number("MASTER_PORT", 29500, environment),
        nproc=_number("NPROC", 0, environment),
        profile=environment.get("PROFILE", ""),
        logs=Path(environment.get("LOGS") or "outputs/logs"),
    )
    last = options.nodes - 1
    if options.nodes < 1:
        raise UsageError("NNODES=0: must be at least 1")
    if options.nproc < 1 and environment.get("NPROC"):
        raise UsageError("NPROC=0: must be at least 1")
    if not 1 <= options.port <= 65535:
        raise UsageError(f"MASTER_PORT={options.port}: must be 1 to 65535")
    if options.node > last:
        raise UsageError(f"NODE_RANK={options.node}: must be 0 to {last} with NNODES={options.nodes}")
    if options.nodes > 1 and not environment.get("NODE_RANK"):
        raise UsageError(f"NODE_RANK is not set: set it to the number of this node, 0 to {last}")
    if options.nodes > 1 and not options.master:
        raise UsageError("MASTER_ADDR is not set: set it to the name or address of node 0")
    return options


def _number(name: str, default: int, environment: Mapping[str, str]) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text} is not a number")
    return int(text)


if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torchrun handles."""
STOP_TIMEOUT_S = 600
"""Seconds that ranks have to finish a step and to save after a signal, if TORCH_ELASTIC_SHUTDOWN_TIMEOUT is not set."""


def build_parser() -> OneLineParser:
    """Build the parser of the help text. The arguments themselves are parsed by the job."""
    parser = OneLineParser(
        "torchtitan-npu launch",
        usage="torchtitan-npu launch --job.config_file X.toml [--section.key value ...]",
        description=__doc__,
    )
    parser.add_argument("--job.config_file", metavar="X.toml", help="the job's TOML file")
    return parser


def main(argv: list[str]) -> int:
    """Launch the job with the arguments ``argv`` and return the exit code."""
    if "-h" in argv or "--help" in argv:
        build_parser().parse_args(["--help"])
    for number in SIGNALS:  # until torchrun installs its own handlers
        signal.signal(number, interrupt)
    try:
        check_arguments(argv)
        options = read_options(os.environ)
        folder = prepare_logs(options)
        try:
            from torchtitan_npu import platform  # imports torch, which is slow: the options are checked before
        except ModuleNotFoundError as missing:
            raise UsageError(f"{sys.executable} has no {missing.name}: see docs/how-to/install.md") from missing
        prepare_environment(options.profile or platform.backend())
        if options.nodes > 1 and platform.backend() == "npu":
            choose_interface(options.master)
        return launch(options, folder, argv)
    except UsageError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as ended:
        (number,) = ended.args
        print(f"launch: ended by {number.name}", file=sys.stderr)
        return 128 + number


def check_arguments(argv: list[str]) -> None:
    """Raise :class:`UsageError` for an option that is no key of a job: torchrun would parse it."""
    for argument in argv:
        option = argument.partition("=")[0]
        if re.match("--?[a-z]", option) and "." not in option:
            raise UsageError(
                f"{option}: arguments are keys of the job, --section.key value; ranks and nodes are environment "
                "variables: NPROC=8 torchtitan-npu launch ... (docs/how-to/launch.md)"
            )


def interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Handle a signal: raise it as a ``KeyboardInterrupt``."""
    raise KeyboardInterrupt(signal.Signals(number))


def record_signals() -> list[signal.Signals]:
    """Return a list to which later signals are appended. They no longer interrupt this process."""
    recorded: list[signal.Signals] = []
    for number in SIGNALS:
        signal.signal(number, lambda received, _: recorded.append(signal.Signals(received)))
    return recorded


def prepare_logs(options: LaunchOptions) -> Path:
    """Create and return the log folder of this launch on this node. Remove the report of an earlier launch."""
    node = options.logs / f"node{options.node}"
    try:
        node.mkdir(parents=True, exist_ok=True)
        report_path(options.logs, options.node).unlink(missing_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d_%H%M%S_"), dir=node))
    except OSError as error:
        raise UsageError(f"LOGS={options.logs}: {error.strerror}: {error.filename}") from error


def prepare_environment(name: str) -> None:
    """Add the profile to the environment of this process, which the ranks inherit. Print the added variables."""
    added = profile.apply(name, os.environ)
    unchanged = [variable.name for variable in profile.read(name) if variable.name not in added]
    print(f"launch: profile {name}: {' '.join(f'{k}={v}' for k, v in added.items()) or 'nothing to add'}")
    if unchanged:
        print(f"launch: kept your settings: {' '.join(f'{k}={os.environ[k]}' for k in unchanged)}")
    os.environ |= added


def choose_interface(master: str) -> None:
    """Let HCCL and gloo use the interface towards node 0, unless the user has chosen one.

    HCCL takes the first interface by name. With several, it may be one that does not reach the other nodes.
    """
    if any(name in os.environ for name in SELECTORS):
        return
    found = addresses()
    name = interface_towards(master, found) if len(found) > 1 else None
    if name is None:
        if len(found) > 1:
            print(
                f"launch: {len(found)} network interfaces ({', '.join(found)}), and none is known to reach {master}; "
                "HCCL takes the first by name, unless you set HCCL_SOCKET_IFNAME"
            )
        return
    added = {"HCCL_SOCKET_IFNAME": f"={name}"}  # "=": exactly this name, not a prefix
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        added["GLOO_SOCKET_IFNAME"] = name
    print(
        f"launch: {len(found)} network interfaces; towards {master}: {' '.join(f'{k}={v}' for k, v in added.items())}"
    )
    os.environ |= added


def launch(options: LaunchOptions, folder: Path, job: list[str]) -> int:
    """Run the job on this node, report failures and return the exit code.

    Raise ``KeyboardInterrupt``, as :func:`interrupt` does, if a signal ended the job.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from torchtitan_npu.cli.launch.failure_report import DeferErrors

    started = time.time()
    print(f"launch: logs of this node's ranks: {folder}", flush=True)
    # Its messages about a failed rank are replaced by the report below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    out, err = DeferErrors(sys.stdout), DeferErrors(sys.stderr)
    described = False
    try:
        with redirect_stdout(out), redirect_stderr(err):
            failed = run_ranks(torchrun_arguments(options, folder, job))
        signals = record_signals()  # torchrun's handlers would raise in the middle of the report
        if failed is None:
            return 0
        if stop := stop_message(folder):  # after a signal to a rank or another node, or a step that is not finite
            return report_stop(*stop)
        out.hold()  # other nodes may report after the time limit of deferred errors
        err.hold()
        failures = failures_of(failed, options.node, folder)
        write_report(options.logs, options.node, failures)
        if reason := refusal(failures):
            print(f"launch: error: {reason}", file=sys.stderr, flush=True)
            described = True
            return EXIT_USAGE
        other_nodes = [node for node in range(options.nodes) if node != options.node]
        reports = {options.node: failures} | gather_reports(options.logs, other_nodes, started, signals)
        print(describe(reports, options.nodes), file=sys.stderr, flush=True)
        described = True
        if signals:
            raise KeyboardInterrupt(signals[0])
        return 1
    except SignalException as ended:  # torchrun has stopped the ranks
        if stop := stop_message(folder):
            return report_stop(*stop)
        raise KeyboardInterrupt(ended.sigval) from None
    except (RendezvousError, DistError) as error:
        print(f"launch: error: {rendezvous_error(options, error)}", file=sys.stderr)
        return 2
    finally:
        for stream in (out, err):
            stream.release(drop=described)  # the report contains rank 0's error or its cause


def report_stop(message: str, exit_code: int) -> int:
    """Print the message of ranks that have stopped together, and return their exit code."""
    print(f"launch: {message}", file=sys.stderr)
    return exit_code


def run_ranks(arguments: list[str]) -> ChildFailedError | None:
    """Run torchrun until the ranks of this node have ended. Return the failed ranks."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = torchrun.parse_args(arguments)
    # During the rendezvous torchrun waits in C++ for up to 15 minutes, where no Python handler runs. With the default
    # action, a signal ends the process. torchrun installs its own handlers before it starts the ranks.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_TIMEOUT_S))
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        return error
    return None


def rendezvous_error(options: LaunchOptions, error: Exception) -> str:
    """Return one line that says why the nodes did not find each other, and what to check."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = f"MASTER_ADDR={options.master} MASTER_PORT={options.port}"
    if options.nodes == 1:
        return f"torchrun did not start: {text}"
    advice = "is another launch running there, or is this not the address of this node?"
    if options.node > 0:
        advice = "is node 0 running, and reachable from this node?"
    return f"rendezvous of {options.nodes} nodes failed at {where}: {text} ({advice})"


def torchrun_arguments(options: LaunchOptions, folder: Path, job: list[str]) -> list[str]:
    """Return the command line of torchrun for this node."""
    import torch

    from torchtitan_npu import platform

    nproc = options.nproc or (
        1 if platform.backend() == "cpu" else torch.get_device_module(platform.backend()).device_count()
    )
    nodes = ["--standalone"]
    if options.nodes > 1:
        nodes = [f"--nnodes={options.nodes}", f"--node_rank={options.node}"]
        nodes += [f"--master_addr={options.master}", f"--master_port={options.port}"]
    # Show rank 0 on the console. The other ranks only write to their log files.
    show = ["--tee=3", "--local_ranks_filter=0"] if options.node == 0 else ["--redirects=3"]
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

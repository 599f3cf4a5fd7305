#!/usr/bin/env python
"""The part of tools/launch.sh that is not shell: the environment profile, torchrun, and who failed first.

    python tools/launch.py [--profile NAME] [--logs FOLDER] [--nproc N]
                           [--nodes N --node K --master HOST --port P] -- ...

What follows ``--`` goes to torchtitan_npu.train. Exit code 0: trained, 1: a rank failed, 2: not started.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from launching import profile
from launching.console import WithholdErrors
from launching.failures import describe, failures_of, gather_reports, report_path, write_report
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError


def main() -> None:
    args = parse_args()
    try:
        prepare_environment(args.profile or platform.home())
    except UsageError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(launch(args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser("launch.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--profile", help="an environment of train_configs/env, or none (default: that of the home)")
    parser.add_argument("--logs", type=Path, default=Path("outputs/logs"), help="shared by the nodes, if it can be")
    parser.add_argument("--nproc", type=int, help="ranks of this node (default: its devices; on a CPU, 1)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="the number of this node, from 0")
    parser.add_argument("--master", help="host name or address of node 0")
    parser.add_argument("--port", type=int, default=29500, help="a free port of node 0")
    parser.add_argument("job", nargs=argparse.REMAINDER, help="-- and the arguments of torchtitan_npu.train")
    return parser.parse_args()


def prepare_environment(name: str) -> None:
    """Add the profile to this process's environment, which the ranks inherit, and say what it added."""
    added = profile.apply(name, os.environ)
    kept = [variable.name for variable in profile.read(name) if variable.name not in added]
    print(f"launch: profile {name}: {' '.join(f'{k}={v}' for k, v in added.items()) or 'nothing to add'}")
    if kept:
        print(f"launch: kept as you set it: {' '.join(f'{k}={os.environ[k]}' for k in kept)}")
    os.environ |= added


def launch(args: argparse.Namespace) -> int:
    """Run the job on this node, and explain its end; return the exit code."""
    started = time.time()
    args.logs.mkdir(parents=True, exist_ok=True)
    report_path(args.logs, args.node).unlink(missing_ok=True)
    folder = args.logs / f"node{args.node}"
    print(f"launch: logs of this node's ranks: {folder}", flush=True)
    # what it logs when a rank fails is said below, in the right order
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    out, err = WithholdErrors(sys.stdout), WithholdErrors(sys.stderr)
    failed = False
    try:
        with redirect_stdout(out), redirect_stderr(err):
            torchrun.run(torchrun.parse_args(torchrun_arguments(args, folder)))
    except ChildFailedError as error:
        failed = True
        run = max(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        logs = {int(path.name): path for path in run.glob("attempt_*/[0-9]*")}
        write_report(args.logs, args.node, failures_of(error, args.node, logs))
        print(describe(gather_reports(args.logs, args.nodes, started), args.nodes), file=sys.stderr, flush=True)
    finally:
        for stream in (out, err):
            stream.release(drop=failed)  # rank 0's error is in the report, or followed from another's; its log has it
    return int(failed)


def torchrun_arguments(args: argparse.Namespace, folder: Path) -> list[str]:
    nproc = args.nproc or (1 if platform.home() == "cpu" else torch.get_device_module(platform.home()).device_count())
    nodes = ["--standalone"]
    if args.nodes > 1:
        nodes = [f"--nnodes={args.nodes}", f"--node_rank={args.node}"]
        nodes += [f"--master_addr={args.master}", f"--master_port={args.port}"]
    # rank 0 on the console; the others in their files
    show = ["--tee=3", "--local_ranks_filter=0"] if args.node == 0 else ["--redirects=3"]
    job = args.job[1:] if args.job[:1] == ["--"] else args.job
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


if __name__ == "__main__":
    main()

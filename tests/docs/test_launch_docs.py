"""The examples of docs/how-to/launch.md and tools/slurm start the launcher of each node with the right options."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from torchtitan_npu.cli.doctor.command import CHECKS
from torchtitan_npu.cli.launch.command import LaunchOptions, read_options

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/launch.md").read_text()
SBATCH = ROOT / "tools/slurm/two_nodes.sbatch"
JOB = "--job.config_file my_job.toml"


def block(language: str, words: str) -> str:
    """Return the example that contains ``words``."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if words in text)
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with a fake command that records its calls. ``DOCTOR`` is the exit code of the doctor."""
    for path, text in {
        "bin/torchtitan-npu": 'command=$1; shift; "$command" "$@"',
        "bin/launch": 'echo "$@" > launched; env > environment',
        "bin/doctor": 'echo "$@" > examined; exit $DOCTOR',
        ".venv/bin/activate": "",
        "bin/scontrol": '[ "$*" = "show hostnames node[3-10]" ] && seq -f node%g 3 10',
        "bin/srun": 'SLURM_NODEID=$((SLURM_NNODES - 1)) exec "$@"',
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    return tmp_path


def run(command: list[str], checkout: Path, **environment: str) -> int:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(command, cwd=checkout, env={"PATH": path, "DOCTOR": "0"} | environment).returncode


def launched(checkout: Path) -> tuple[str, LaunchOptions]:
    """Return the arguments and options of the launch."""
    lines = (checkout / "environment").read_text().splitlines()
    return (checkout / "launched").read_text().strip(), read_options(dict(line.split("=", 1) for line in lines))


SLURM = {"SLURM_JOB_NODELIST": "node[3-10]", "SLURM_JOB_ID": "12"}
SLURM_SCRIPTS = {8: block("bash", "#SBATCH"), 2: SBATCH.read_text()}
"""Scripts by their number of nodes."""


def run_slurm(nodes: int, checkout: Path, **environment: str) -> int:
    """Run a script as SLURM does: the options of the job after its name."""
    environment |= SLURM | {"SLURM_NNODES": str(nodes), "SLURM_SUBMIT_DIR": str(checkout)}
    return run(["bash", "-c", SLURM_SCRIPTS[nodes], "script", *JOB.split()], checkout, **environment)


@pytest.mark.parametrize("nodes", SLURM_SCRIPTS)
def test_slurm(nodes: int, checkout: Path) -> None:
    options_of_sbatch = " ".join(re.findall(r"^#SBATCH (.*)", SLURM_SCRIPTS[nodes], re.MULTILINE)).split()
    assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive"} <= set(options_of_sbatch)
    assert run_slurm(nodes, checkout) == 0
    job, options = launched(checkout)
    assert job == JOB
    assert (options.nodes, options.node, options.master) == (nodes, nodes - 1, "node3")
    assert options.logs == checkout / "logs/12"
    option, checks = (checkout / "examined").read_text().split()
    assert option == "--only" and set(checks.split(",")) <= set(CHECKS)


@pytest.mark.parametrize("nodes", SLURM_SCRIPTS)
def test_a_red_line_ends_a_slurm_job(nodes: int, checkout: Path) -> None:
    assert run_slurm(nodes, checkout, DOCTOR="1") == 1
    assert not (checkout / "launched").exists()


def test_kubernetes(checkout: Path) -> None:
    service, job = yaml.safe_load_all(block("yaml", "kind: Job"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}  # the label of an Indexed Job's pods
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    environment = container_environment(container["env"], {"batch.kubernetes.io/controller-uid": "9a3c"})
    assert run(container["command"], checkout, **environment, JOB_COMPLETION_INDEX="7") == 0
    arguments, options = launched(checkout)
    assert arguments == JOB and (options.nodes, options.node) == (spec["completions"], 7)
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    # The pods of an Indexed Job are named after the job and their index, in the domain of the service.
    assert options.master == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options.logs == Path(container["volumeMounts"][0]["mountPath"]) / "logs" / "9a3c"  # one folder per job


def container_environment(variables: list[dict[str, Any]], labels: dict[str, str]) -> dict[str, str]:
    """Return the environment like Kubernetes: values are labels of the pod, or text with ``$(NAME)`` references."""
    environment: dict[str, str] = {}
    for variable in variables:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], variable["value"])
        environment[variable["name"]] = value
    return environment


def test_two_nodes_by_hand(checkout: Path) -> None:
    lines = block("bash", "two nodes").splitlines()
    for node, line in enumerate(line for line in lines if not line.startswith("#")):
        assert run(["bash", "-c", line], checkout) == 0
        job, options = launched(checkout)
        assert job == JOB and (options.nodes, options.node, options.master) == (2, node, "host0")

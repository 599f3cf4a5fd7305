"""Draw jobs from the allowed values of every key, inside and outside, and run each in a forked process.

Property: an accepted job trains two steps with a finite loss; a refused one prints one line, exits with 2 and writes no
file; a value outside of what its key allows is refused by a line that names the key. If that line is about another key
of the case, the case runs again without this key: a module of configuration keys, for instance, is imported first.
``tools/fuzz_config.py`` runs thousands of cases, ``tests/preflight/test_values.py`` some of them.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

TIMEOUT_S = 120
PREFIX = "torchtitan_npu: error: "
BASE = {
    "model.name": "llama3",
    "model.flavor": "llama3",
    "model.hf_assets_path": "torchtitan_npu/assets/tokenizer",
    "training.dataset": "tiny_corpus",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.steps": 2,
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
    "comm.trace_buf_size": 0,
    "validation.dataset": "tiny_corpus_validation",
    "validation.seq_len": 32,
    "validation.local_batch_size": 1,
    "validation.steps": 1,
    "validation.freq": 1,
}
OTHER_MODEL = {"model.name": "deepseek_v32", "model.flavor": "tiny"}
"""For the keys of [dsa] and [mtp]."""
OWN_DATA = {"training.dataset": "text", "training.dataset_path": "texts.txt"}
"""For the keys of [data]."""
HARNESS = {"job.config_file"}
"""Keys that the harness itself sets."""
CHECKED_ONLY = {"compile.enable"}
"""A job with one of these set takes too long to run a thousand times: only its check runs."""

NAMES = st.text(alphabet="abcXYZ019_-. é", min_size=1, max_size=12)
FOLDERS = st.sampled_from(["out", "a/b", "./c", "texts.txt", "texts.txt/d", "/dev/null", "/proc/no/such"])
FILES = st.sampled_from(["texts.txt", "no/such", ".", "empty"])
MODULES = st.sampled_from(["", "json", "no_such_module", "torchtitan_npu.no_such"])
MODEL_PARTS = st.lists(st.sampled_from(["tok_embeddings", "layers.0", "layers.1", "norm", "output"]), max_size=3)
INSIDE: dict[str, st.SearchStrategy[Any]] = {
    "activation_checkpoint.selective_ac_option": st.sampled_from(["op", "0", "1", "2", "999999999"]),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": st.lists(
        st.sampled_from(["moe.router.gate", "attention.wq", "attention", "w1", "nothing"]), max_size=2
    ),
    "checkpoint.folder": FOLDERS,
    "checkpoint.initial_load_path": FILES | st.just(""),
    "comm.hccl_buffers": st.lists(st.sampled_from(["ep=64", "tp", "x=1", "ep=0", "fsdp=99999999999"]), max_size=2),
    "comm.save_traces_folder": FOLDERS,
    "comm.save_traces_file_prefix": st.sampled_from(["rank_", "r", "."]),
    "comm.trace_buf_size": st.integers(0, 3000),
    "compile.backend": st.sampled_from(["inductor", "eager", "no_such"]),
    "data.chat_template": FILES | st.just(""),
    "data.field": st.sampled_from(["", "text", "body"]),
    "data.paths": st.lists(FILES, max_size=2),
    "data.shuffle_window_mib": st.integers(1, 100),
    "data.weights": st.lists(st.sampled_from([0.5, 1.0, 3]), max_size=2),
    "experimental.custom_args_module": MODULES,
    "experimental.custom_import": MODULES,
    "job.custom_config_module": MODULES,
    "job.dump_folder": FOLDERS,
    "job.save_config_file": st.sampled_from(["job.json", "a/job.json", "../job.json", "/tmp/x/job.json", "", "."]),
    "metrics.save_tb_folder": FOLDERS,
    "model.converters": st.lists(
        st.sampled_from(
            [
                *("npu_rms_norm", "npu_rope", "npu_attention", "npu_gmm", "npu_permute", "npu_swiglu"),
                *("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "no_such"),
            ]
        ),
        max_size=3,
    ),
    "model.flavor": st.sampled_from(["llama3", "no_such", "debugmodel_flex_attn"]),
    "model.hf_assets_path": st.sampled_from(["torchtitan_npu/assets/tokenizer", "empty", "damaged", "texts.txt"]),
    "model.name": st.sampled_from(["llama3", "no_such", "flux", "simple_fsdp.llama3"]),
    "model.tokenizer_path": st.sampled_from(["torchtitan_npu/assets/tokenizer", "empty", "damaged", "texts.txt"]),
    "mtp.layers": st.integers(0, 2) | st.just(1000),
    "npu.context_parallel": st.sampled_from(["", "json:loads", "no.such:Class", "x"]),
    "npu.graph_passes": st.lists(st.sampled_from(["no_ops", "async_tp", "nothing"]), max_size=2),
    "optimizer.name": st.sampled_from(["Adam", "AdamW", "no_such"]),
    "optimizer.swap_slice_mib": st.integers(1, 64),
    "parallelism.module_fqns_per_model_part": st.lists(MODEL_PARTS, max_size=3),
    "parallelism.pipeline_parallel_schedule": st.sampled_from(["1F1B", "GPipe", "no_such"]),
    "parallelism.pipeline_parallel_schedule_csv": FILES,
    "profiling.save_memory_snapshot_folder": FOLDERS,
    "profiling.save_traces_folder": FOLDERS,
    "training.global_batch_size": st.integers(1, 8) | st.just(-1),
    "training.steps": st.integers(1, 3),
    **{
        f"{section}.{key}": values
        for section in ("training", "validation")
        for key, values in {
            "dataset": st.sampled_from(
                ["tiny_corpus", "TINY_CORPUS", "tiny_corpus_validation", "text", "chat", "c4_test", "no_such"]
            ),
            "dataset_path": FILES,
            "local_batch_size": st.integers(1, 4),
            "seq_len": st.integers(1, 64),
            "dataloader.num_workers": st.integers(0, 2),
            "dataloader.prefetch_factor": st.integers(1, 4),
        }.items()
    },
    "validation.steps": st.integers(1, 2),
}
"""Values that a small machine can run, and those whose validity other keys or files decide."""


@dataclass(frozen=True)
class Case:
    """A job: the keys that it changes, and those among them with a value that the key does not allow."""

    changes: dict[str, Any]
    outside: frozenset[str]
    on_command_line: bool

    @property
    def is_only_checked(self) -> bool:
        return any(self.changes.get(key) is True for key in CHECKED_ONLY)

    def without(self, keys: set[str]) -> Case:
        changes = {key: value for key, value in self.changes.items() if key not in keys}
        return Case(changes, self.outside - keys, self.on_command_line)

    def __str__(self) -> str:
        where = "command line" if self.on_command_line else "file"
        return f"{where}: {', '.join(f'{key} = {value!r:.200}' for key, value in self.changes.items())}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case, for the JSON file of a campaign."""

    number: int
    case: str
    keys: list[str]
    accepted: bool
    fault: str
    """How the result breaks the property, or an empty string."""


@dataclass
class Figures:
    """Count the outcomes of the cases that ran."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return len(self.outcomes)

    @property
    def accepted(self) -> int:
        return sum(outcome.accepted and not outcome.fault for outcome in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(not outcome.accepted and not outcome.fault for outcome in self.outcomes)

    @property
    def keys(self) -> set[str]:
        return {key for outcome in self.outcomes for key in outcome.keys}

    @property
    def faults(self) -> list[str]:
        return [f"{outcome.case}\n  {outcome.fault}" for outcome in self.outcomes if outcome.fault]

    def __str__(self) -> str:
        return (
            f"{self.cases} cases over {len(self.keys)} keys: {self.accepted} accepted, {self.refused} refused, "
            f"{len(self.faults)} faults"
        )


@dataclass(frozen=True)
class Result:
    code: int | None
    """``None`` if it ran longer than the time-out."""
    output: str
    errors: str
    files: list[str]
    """Files that the job has written."""


def fault_of(case: Case, result: Result) -> str | None:
    """Return how the result breaks the property, or ``None``."""
    end = result.errors.strip()[-1500:]
    if result.code is None:
        return f"ran longer than {TIMEOUT_S} s"
    if result.code == 0:
        if case.outside:
            return f"was accepted with {', '.join(case.outside)} outside"
        if not case.is_only_checked and "Training completed" not in result.output:
            return f"did not train: {result.output[-300:]}"
        losses = [float(loss) for loss in re.findall(r"loss:\s+(\S+?)(?:\x1b|\s)", result.output)]
        return None if all(map(math.isfinite, losses)) else f"has the losses {losses}"
    # torch's log has lines such as "W1117 17:07:26 ...", here of packages that a model imports
    lines = [line for line in result.errors.splitlines() if not re.match(r"W\d{4} ", line)]
    if result.code != 2:
        return f"exit code {result.code}: {end}"
    if len(lines) != 1 or not lines[0].startswith(PREFIX):
        return f"is refused in {len(lines)} lines: {end}"
    if len(lines[0]) > 1000:
        return f"is refused in a line of {len(lines[0])} characters"
    if result.files:
        return f"is refused and has written {result.files}"
    if case.outside and not named_keys(case, result):
        return f"names none of {sorted(case.changes)}: {lines[0]}"
    return None


def named_keys(case: Case, result: Result) -> set[str]:
    """Return the keys of ``case`` that the errors name."""
    return {key for key in case.changes if key in result.errors.replace("-", "_")}


def run_and_check(run: Callable[[Case], Result], case: Case) -> tuple[Result, str]:
    """Run ``case``. Return its result, and how it breaks the property, or an empty string."""
    result = run(case)
    fault = fault_of(case, result)
    if fault is None and case.outside and case.outside.isdisjoint(named := named_keys(case, result)):
        _, fault = run_and_check(run, case.without(named))
    return result, fault or ""


def inside(key: str, kind: Any, allowed: Any) -> st.SearchStrategy[Any]:
    """Draw values that ``key`` allows, if the other keys agree."""
    from torchtitan_npu.config.allowed import ListOf, Number, OneOf

    if key in INSIDE:
        return INSIDE[key]
    if kind is bool:
        return st.booleans()
    if choices := _choices(kind):
        return st.sampled_from(choices)
    if isinstance(allowed, Number):
        also = st.sampled_from([*allowed.also, allowed.minimum if not allowed.above else 1])
        if "float" in str(kind):
            limits = {"exclude_min": allowed.above, "exclude_max": allowed.below}
            return also | st.floats(float(allowed.minimum), float(allowed.maximum), **limits)
        return also | st.integers(int(allowed.minimum), int(allowed.maximum))
    if isinstance(allowed, OneOf):
        return st.sampled_from(allowed.choices)
    if isinstance(allowed, ListOf):
        return st.lists(inside("", int if isinstance(allowed.item, Number) else str, allowed.item), max_size=3)
    return NAMES.filter(lambda text: text.strip(" .") != "")


def _choices(kind: Any) -> list[Any]:
    """Return the choices of a literal type, also if it may be ``None``."""
    literals = [option for option in (kind, *get_args(kind)) if get_origin(option) is Literal]
    return [choice for literal in literals for choice in get_args(literal)]


def outside(key: str, kind: Any, allowed: Any) -> st.SearchStrategy[Any]:
    """Draw values that ``key`` never allows."""
    from torchtitan_npu.config.allowed import LINE, MODULE, ListOf, Number, OneOf

    wrong_type = st.sampled_from([[[1]], {"x": 1}])
    if kind is bool or _choices(kind):
        return st.sampled_from(["no_such", 3.5, 10**30]) | wrong_type
    if isinstance(allowed, Number):
        low, high = allowed.minimum, allowed.maximum
        values: list[Any] = ["ten", True, math.nan, -math.inf, low - 1, -(10**30)]
        values += [low] if allowed.above else []
        values += [high] if allowed.below else []
        values += [] if high == math.inf else [math.inf, high + 1, 2**64, 10**400]
        return st.sampled_from([value for value in values if value not in allowed.also]) | wrong_type
    if isinstance(allowed, ListOf):
        return st.lists(outside("", str, allowed.item), min_size=1, max_size=2) | st.just({"x": 1})
    if isinstance(allowed, OneOf):
        return NAMES.filter(lambda text: text not in allowed.choices) | st.sampled_from(["", "\n", 3]) | wrong_type
    texts = ["two\nlines", "nul\0", "\x1b[31m", 3]
    if allowed is MODULE:
        texts += ["a..b", ".a", "1a", "a b", "a/b"]
    elif allowed is not LINE and not getattr(allowed, "or_empty", False):
        texts += [""]
    return st.sampled_from(texts) | wrong_type


@cache
def keys() -> dict[str, tuple[Any, Any]]:
    """Return the type and the allowed values of every key, from the dataclasses themselves."""
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.config.value_table import TABLE, config_keys

    return {key: (kind, TABLE.get(key)) for key, kind, _ in config_keys(JobConfig()) if key not in HARNESS}


@cache
def values(key: str, is_outside: bool) -> st.SearchStrategy[Any]:
    return (outside if is_outside else inside)(key, *keys()[key])


@st.composite
def cases(draw: Any) -> Case:
    """Draw a case that changes one to three keys."""
    known = keys()
    drawn = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=3, unique=True))
    changes: dict[str, Any] = {}
    wrong = set()
    for key in drawn:
        is_outside = draw(st.sampled_from([False, False, True]))
        changes[key] = draw(values(key, is_outside))
        wrong |= {key} if is_outside else set()
    # on the command line, every value of a text key is text
    plain = all(
        isinstance(value, str)
        or (isinstance(value, (int, float)) and not isinstance(value, bool) and "str" not in str(known[key][0]))
        for key, value in changes.items()
    )
    return Case(changes, frozenset(wrong), plain and draw(st.booleans()))


def draw_cases(count: int, number: int) -> list[Case]:
    """Return ``count`` cases of the seed ``number``. Another count has other cases."""
    drawn: dict[str, Case] = {}

    @seed(number)
    @settings(
        max_examples=2 * count,  # hypothesis varies what it has drawn, and repeats itself
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def add(case: Case) -> None:
        drawn.setdefault(str(case), case)

    add()
    return list(drawn.values())[:count]


def run_cases(drawn: dict[int, Case], parallel: int = 1, seconds: float = math.inf) -> Iterator[tuple[Outcome, Result]]:
    """Run cases by number, ``parallel`` at a time, and yield their outcomes. After ``seconds``, none starts."""
    deadline = time.monotonic() + seconds
    waiting = iter(drawn.items())
    with ExitStack() as stack, ThreadPoolExecutor(parallel) as pool:
        idle = [stack.enter_context(running_server()) for _ in range(parallel)]
        running: dict[Future[tuple[Result, str]], tuple[int, Case, Any]] = {}
        while True:
            while idle and time.monotonic() < deadline and (following := next(waiting, None)):
                server = idle.pop()
                running[pool.submit(run_and_check, server, following[1])] = (*following, server)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, case, server = running.pop(future)
                idle.append(server)
                result, fault = future.result()
                yield Outcome(number, str(case), sorted(case.changes), result.code == 0, fault), result


@contextmanager
def running_server() -> Iterator[Any]:
    """Yield a function that runs a case in a process of its own, forked from one that has imported the package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._helpers.multirank_preload"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(sys.path, theirs))  # not a daemon: data loaders start workers
    process.start()
    theirs.close()

    def run(case: Case) -> Result:
        ours.send(case)
        return ours.recv()

    try:
        yield run
    finally:
        process.kill()
        process.join()


def _serve(path: list[str], connection: Connection) -> None:
    sys.path[:] = path
    import shutil
    import tempfile

    import torch
    from torch.nn.attention.flex_attention import flex_attention

    from tests._helpers import layouts
    from tests._helpers.deepseek_v32_training import SMALLER
    from torchtitan_npu.config.parser import JobConfigManager
    from torchtitan_npu.preflight.job import check_job, check_start

    layouts.add_flavors()
    layouts.add_flavor("deepseek_v32", "tiny", {**SMALLER, "n_layers": 2, "inter_dim": 96, "moe_inter_dim": 32})
    # imports and caches that every case would fill again
    torch.compile(flex_attention)
    check_start(check_job(JobConfigManager().parse_args([f"--{key}={value}" for key, value in BASE.items()]), 1))
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="config_fuzz_"))
        connection.send(_run(case, folder))
        shutil.rmtree(folder)


def _run(case: Case, folder: Path) -> Result:
    job = folder / "job"
    (job / "empty").mkdir(parents=True)
    (job / "damaged").mkdir()
    (job / "damaged/tokenizer.json").write_text('{"version": ')
    (job / "texts.txt").write_text("some text to train on. " * 1000)
    values = dict(BASE)
    if any(key.startswith(("dsa.", "mtp.")) for key in case.changes):
        values |= OTHER_MODEL
    if any(key.startswith("data.") for key in case.changes):
        values |= OWN_DATA
    arguments = [f"--{key}={value}" for key, value in case.changes.items()] if case.on_command_line else []
    (folder / "job.toml").write_text(as_toml(values if case.on_command_line else values | case.changes))
    before = _files(job)
    pid = os.fork()
    if pid == 0:
        _train([f"--job.config_file={folder / 'job.toml'}", *arguments], folder, case)
    code = _wait(pid)
    output, errors = ((folder / name).read_text(errors="replace") for name in ("output", "errors"))
    return Result(code, output, errors, sorted(_files(job) - before))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _train(arguments: list[str], folder: Path, case: Case) -> None:
    """Run the entry in this process, as torchrun would with one rank."""
    os.setsid()
    os.chdir(folder / "job")
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    ranks = ("RANK", "LOCAL_RANK", "MASTER_PORT"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict.fromkeys(ranks[0], "0") | dict.fromkeys(ranks[1], "1") | {"MASTER_ADDR": "127.0.0.1"}
    sys.argv = ["train", *arguments]
    import torchtitan_npu.train as entry
    import torchtitan_npu.trainer as trainer_module

    # the Trainer sleeps two seconds after the last step
    trainer_module.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    if case.is_only_checked:
        entry.train = lambda config: None
    try:
        entry.run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def as_toml(values: dict[str, Any]) -> str:
    """Write ``section.key`` values as TOML, with dotted keys."""
    return "\n".join(f"{key} = {_toml(value)}" for key, value in values.items()) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)

"""Run ``torchtitan-npu prove`` in worker processes that are reused: a draw is quick after a similar one.

python -m tests._helpers.prove_draws --draws 300 --json results.json     # the arguments of prove
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

from tests._helpers import multirank
from torchtitan_npu.cli.prove import main
from torchtitan_npu.prover.training import RankError, RankTimeout


def prove(argv: list[str]) -> int:
    return main(argv, run_on_ranks)


def run_on_ranks(world_size: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Do the same as :func:`torchtitan_npu.prover.training.run_on_ranks`, in the workers of the tests."""
    try:
        return multirank.run_on_ranks(world_size, _call, function, args, timeout=timeout_s, process_group=False)
    except multirank.RankTimeout as error:
        raise RankTimeout(str(error)) from error
    except multirank.RankError as error:
        raise RankError(str(error)) from error


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        return function(*args)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(prove(sys.argv[1:]))

"""Our checks reject every call that torch_npu rejects; torch_npu accepts those that only we reject."""

from __future__ import annotations

import pytest

from tests._helpers.contract_operators import (
    REJECTED,
    check_error,
    meta_kernel_error,
    on_fake_tensors,
    ours,
)
from tests._helpers.op_cases import Case
from torchtitan_npu.errors import UsageError


@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_we_reject_the_call(case: Case) -> None:
    with pytest.raises(UsageError, match=f"^{case.op}: "):
        on_fake_tensors(ours(case), case)


@pytest.mark.parametrize("case", [case for case in REJECTED if case.rejected_by == "torch_npu"], ids=str)
def test_torch_npu_rejects_the_call(case: Case) -> None:
    assert meta_kernel_error(case) or check_error(case)


@pytest.mark.parametrize("case", [case for case in REJECTED if case.rejected_by == "us"], ids=str)
def test_torch_npu_accepts_the_call(case: Case) -> None:
    """If this fails, torch_npu rejects the call now: change ``rejected_by``."""
    assert meta_kernel_error(case) is None
    assert check_error(case) is None

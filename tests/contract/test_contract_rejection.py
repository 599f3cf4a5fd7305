"""What torch_npu rejects, the stand-in rejects; what only the stand-in rejects, torch_npu still lets pass."""

from __future__ import annotations

import pytest

from tests._helpers.both_sides import (
    REJECTED,
    objection_of_the_checks,
    objection_of_the_meta_kernel,
    on_fake_tensors,
    stand_in,
)
from tests._helpers.op_cases import Case
from torchtitan_npu.errors import UsageError


@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_the_stand_in_objects(case: Case) -> None:
    with pytest.raises(UsageError, match=f"^{case.op}: "):
        on_fake_tensors(stand_in(case), case)


@pytest.mark.parametrize("case", [case for case in REJECTED if case.rejected_by == "torch_npu"], ids=str)
def test_torch_npu_objects(case: Case) -> None:
    assert objection_of_the_meta_kernel(case) or objection_of_the_checks(case)


@pytest.mark.parametrize("case", [case for case in REJECTED if case.rejected_by == "us"], ids=str)
def test_torch_npu_does_not_object(case: Case) -> None:
    """When it begins to, the case is torch_npu's."""
    assert objection_of_the_meta_kernel(case) is None
    assert objection_of_the_checks(case) is None

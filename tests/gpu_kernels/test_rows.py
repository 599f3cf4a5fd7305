"""``rows_of`` of the Triton kernels, for documents of all sizes and lengths that are out of range."""

from __future__ import annotations

import pytest
import torch

from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import BLOCK, rows_of


def expected(
    layout: str, causal: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]], lengths: tuple[list[int] | None, ...]
) -> list[tuple[int, int]]:
    """Return, for each row, the first key of its document and the number of keys it may attend to."""
    documents = []
    for shape, of_documents in zip(shapes, lengths, strict=True):
        if layout == "TND":
            assert of_documents is not None
            ends = [min(end, shape[0]) for end in of_documents]
            documents.append(list(zip([0, *ends], ends, strict=False)))
        else:
            batch, tokens = shape[:2]
            counts = [min(max(length, 0), tokens) for length in of_documents or [tokens] * batch]
            documents.append([(row * tokens, row * tokens + count) for row, count in enumerate(counts)])
    total = shapes[0][0] * (1 if layout == "TND" else shapes[0][1])
    rows = []
    for row in range(total):
        # padding belongs to its sequence, or to the last document
        number = row // shapes[0][1] if layout == "BSND" else sum(end <= row for _, end in documents[0][:-1])
        (start, end), (first, last) = documents[0][number], documents[1][number]
        seen = last - first - (end - 1 - row if causal else 0)
        rows.append((first, max(seen, 0) if start <= row < end else 0))
    return rows


LONG = BLOCK + 3
CASES = {
    "one document": ("TND", (5, 7), [5], [7]),
    "empty documents": ("TND", (5, 7), [0, 0, 2, 2, 5, 5], [0, 3, 3, 3, 7, 7]),
    "more keys, fewer keys": ("TND", (6, 6), [1, 6], [5, 6]),
    "rows after the last end": ("TND", (9, 9), [2, 4], [3, 5]),
    "ends beyond": ("TND", (5, 6), [3, 8, 9], [4, 7, 70]),
    "many documents, several programs": ("TND", (LONG, LONG), [*range(3, LONG, 7), LONG], [*range(1, LONG, 7), LONG]),
    "a batch": ("BSND", (2, 3, 5), None, None),
    "a batch with lengths": ("BSND", (4, 3, 5), [3, 0, 2, 1], [5, 4, 0, 2]),
    "lengths of keys alone": ("BSND", (2, 3, 5), None, [2, 5]),
    "lengths beyond": ("BSND", (3, 4, 2), [9, -1, 3], [-5, 2, 7]),
    "several programs": ("BSND", (3, BLOCK // 2 + 1, 9), None, [4, 9, 0]),
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_ugly_lengths(case: str, causal: bool) -> None:
    layout, sizes, *lengths = CASES[case]
    shapes = ((sizes[0],), (sizes[1],)) if layout == "TND" else (sizes[:2], (sizes[0], sizes[2]))
    query, key = (torch.empty(*shape, 1, 2, device=DEVICE) for shape in shapes)
    oracle = expected(layout, causal, shapes, tuple(lengths))

    def strided(values: list[int] | None) -> torch.Tensor | None:
        if values is None:
            return None
        return torch.tensor(values, dtype=torch.int32, device=DEVICE).repeat_interleave(2)[::2]

    for spelt in (lengths, [strided(values) for values in lengths]):
        rows = rows_of(layout, 3 if causal else 0, query, key, *spelt)
        assert rows.first.dtype == rows.visible.dtype == torch.int32
        assert list(zip(rows.first.tolist(), rows.visible.tolist(), strict=True)) == oracle

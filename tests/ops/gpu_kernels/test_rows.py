"""The rows of the Triton kernels see the keys that the reference's documents show them."""

from __future__ import annotations

from hypothesis import given
from sparse_oracle import Documents, documents

from torchtitan_npu.ops.triton.rows import rows_of


@given(documents())
def test_every_row_sees_its_documents_keys(docs: Documents) -> None:
    query, key = (docs.lay_out(docs.random(of_key, 1, 2)) for of_key in (False, True))
    lengths = docs.lengths("query_lengths", "key_lengths")
    given_lengths = {name: lengths.get(name) for name in ("query_lengths", "key_lengths")}
    rows = rows_of(docs.layout, docs.sparse_mode, query, key, **given_lengths)
    start, width = 0, max(docs.tokens(True))
    shape = query.shape[:-2]
    first, visible = rows.first.view(shape), rows.visible.view(shape)
    for number, (seen, firsts, counts) in enumerate(
        zip(docs.visible(), docs.split(first, False), docs.split(visible, False), strict=True)
    ):
        assert counts.tolist() == seen.sum(1).tolist()
        assert (firsts == (start if docs.layout == "TND" else number * width)).all()
        start += seen.shape[1]
    assert (docs.padding(visible, False) == 0).all()

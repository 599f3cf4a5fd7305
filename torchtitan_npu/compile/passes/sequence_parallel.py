"""Sequence parallelism in a graph that was written without: norms and residuals on a rank's own tokens.

All-reduce + (add) + norm becomes reduce-scatter + (add) + norm + all-gather. That sends as many bytes, and what is
between runs on 1 / ranks of the tokens and keeps as little for the backward pass. Which operators these are is not a
list of patterns but a minimum cut: each that treats tokens by themselves may run on a rank's own, from the collectives
on; a value that anyone needs whole is gathered, once. The cut that gathers the fewest bytes is taken, and of those the
one that gathers last. So a residual stays apart from layer to layer, a replicated addend is cut (Qwen3-VL's deepstack),
and an all-gather before a norm (as after the experts of an MoE) moves behind it.
"""

from __future__ import annotations

from typing import Any

import networkx
import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import DifferentiableAOTInput

from torchtitan_npu.compile.passes.graphs import (
    as_matrix,
    aten,
    call,
    collectives,
    is_returned,
    piece,
    process_group,
    value,
    waited,
)
from torchtitan_npu.compile.passes.no_ops import no_ops
from torchtitan_npu.compile.passes.token_wise import (
    Tokens,
    is_norm,
    is_own_chunk,
    is_own_split,
    is_pointwise,
    is_sum_over_tokens,
    is_token_wise,
    token_count,
    write_local,
)

WHOLE = "whole"  # the side of the cut where every rank has all tokens
LOCAL = "local"


def sequence_parallel(graph: fx.Graph, min_tokens: int = 1000, whole_inputs: bool = False) -> int:
    """Rewrite ``graph``, and return how many all-reduces were split and all-gathers were moved.

    Only values of at least ``min_tokens`` tokens that divide by the ranks; with fewer, what a collective costs to start
    is more than what is saved. Training needs the joint graph: in a forward graph, what it saves is an output, whole.
    ``whole_inputs`` is the caller's word that inputs are the same on every rank (:func:`_alike`).
    """
    layouts: dict[tuple[Any, int], list[fx.Node]] = {}
    for node in graph.nodes:
        started = _collective(node)
        count = token_count(value(node))
        if started is None or count is None or count < min_tokens or not value(node).is_contiguous():
            continue
        group = started.args[2]
        if process_group(group).size() > 1 and count % process_group(group).size() == 0:
            layouts.setdefault((group, count), []).append(node)
    if layouts:
        no_ops(graph)  # which may stand between a collective and a norm
    changed = 0
    for (group, count), sources in layouts.items():
        ranks = process_group(group)
        changed += _split(graph, group, Tokens(count, ranks.size(), ranks.rank()), sources, whole_inputs)
    return changed


def _collective(node: fx.Node) -> fx.Node | None:
    """The all-reduce or all-gather whose result ``node`` is: each of them ends with the tokens of every rank."""
    return waited(node, collectives.all_reduce.default) or waited(node, collectives.all_gather_into_tensor.default)


def _split(graph: fx.Graph, group: Any, tokens: Tokens, sources: list[fx.Node], whole_inputs: bool) -> int:
    """Rewrite what follows from ``sources``, all of them collectives of one group and one number of tokens."""
    alike = _alike(graph, group, tokens, whole_inputs)
    of_alike = [node for node in graph.nodes if node not in sources and alike.issuperset(node.all_input_nodes)]
    chunks = {node for node in graph.nodes if is_own_chunk(node, tokens) and piece(node).whole in alike}  # type: ignore[union-attr]
    ends = chunks | {node for node in of_alike if is_sum_over_tokens(node, tokens)}
    splits = {node.args[0] for node in chunks if is_own_split(node.args[0], tokens)}
    able = ends | splits | {node for node in of_alike if is_token_wise(node, tokens)}
    chosen = _worthwhile(_cut(sources, able, ends), tokens)
    if chosen:
        _rewrite(graph, group, tokens, chosen)
    return sum(source in chosen for source in sources)


def _alike(graph: fx.Graph, group: Any, tokens: Tokens, whole_inputs: bool) -> set[fx.Node]:
    """The values that are the same on every rank of ``group``: only those can be cut here and gathered there.

    What an all-reduce or an all-gather gives is, and what is computed from such values alone, token by token. Of an
    input nothing in the graph says so. With ``whole_inputs`` activations (``tokens``) and vectors (gamma) are taken to
    be: a matrix may be one rank's.
    """
    alike: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            same = (
                whole_inputs and _is_given(node) and (value(node).dim() < 2 or token_count(value(node)) == tokens.count)
            )
        elif (started := _collective(node)) is not None:
            same = started.args[2] == group
        else:
            same = alike.issuperset(node.all_input_nodes) and (is_pointwise(node) or is_token_wise(node, tokens))
        if same:
            alike.add(node)
    return alike


def _is_given(placeholder: fx.Node) -> bool:
    """Whether the caller gives this tensor as it is, or its gradient.

    Not so a DTensor's local part, which may be a shard. Nor what a forward graph saved, when the joint graph has been
    cut in two: it is no input of the program, and any rank's own.
    """
    given = isinstance(placeholder.meta.get("desc"), DifferentiableAOTInput)
    return given and isinstance(value(placeholder), torch.Tensor)


def _cut(sources: list[fx.Node], able: set[fx.Node], ends: set[fx.Node]) -> list[fx.Node]:
    """Those of ``sources`` and ``able`` that are to run on local tokens, in the graph's order.

    ``ends`` are those of ``able`` whose results have no part a rank: nothing of them is to gather.
    """
    flow = networkx.DiGraph()  # an edge without capacity cannot be cut
    flow.add_nodes_from((LOCAL, WHOLE))
    for node in (*sources, *able):
        if node in sources:
            flow.add_edge(LOCAL, node)
        if node in ends:
            continue
        if not isinstance(value(node), torch.Tensor):  # several outputs: computed together
            for output in node.users:
                flow.add_edge(node, output if output in able else WHOLE)
                flow.add_edge(output, node)
            continue
        gathered = (node, "gathered")
        if value(node).is_contiguous():
            flow.add_edge(node, gathered, capacity=value(node).shape[-1] * value(node).element_size())
        else:
            flow.add_edge(node, gathered)
        for user in node.users:
            flow.add_edge(gathered, user if user in able else WHOLE)
    # networkx puts on the second side what still reaches the sink, and no more: of the least cuts, the last
    local, _ = networkx.minimum_cut(flow, LOCAL, WHOLE)[1]
    kept: dict[fx.Node, None] = {}
    for node in sorted(node for node in local if isinstance(node, fx.Node)):
        if node in sources or any(argument in kept for argument in node.all_input_nodes):
            kept[node] = None
    return list(kept)


def _worthwhile(nodes: list[fx.Node], tokens: Tokens) -> dict[fx.Node, None]:
    """Those of ``nodes`` by which a collective is linked to a norm, or to a rank's taking its own tokens.

    The rest gains nothing. A value that is gathered is no link: whoever uses it can have it whole, and cut it.
    """
    links = networkx.Graph()
    links.add_nodes_from(nodes)
    for node in nodes:
        if all(user in links for user in node.users):
            links.add_edges_from((node, user) for user in node.users)
    gaining: set[fx.Node] = set()
    for part in networkx.connected_components(links):
        gains = any(is_norm(node) or is_own_chunk(node, tokens) for node in part)
        if gains and any(_collective(node) for node in part):
            gaining |= part
    return {node: None for node in nodes if node in gaining}


def _rewrite(graph: fx.Graph, group: Any, tokens: Tokens, chosen: dict[fx.Node, None]) -> None:
    """Write ``chosen`` for local tokens, gather what others need, and take out what was there."""
    local: dict[fx.Node, fx.Node] = {}  # by value, this rank's tokens of it
    for node in chosen:
        others = [user for user in node.users if user not in chosen]
        with graph.inserting_before(node):
            if is_own_split(node, tokens):
                continue
            if is_own_chunk(node, tokens):
                part: Any = piece(node)
                whole = call(aten.view.default, local[part.whole], list(value(node).shape), like=node)
                if is_returned(node):  # it may be an input's memory now, which the chunk was not
                    whole = call(aten.clone.default, whole, like=node)
            else:
                local[node] = _local(node, tokens, local)
                if not others or not isinstance(value(node), torch.Tensor):
                    continue
                if is_sum_over_tokens(node, tokens):
                    started = call(collectives.all_reduce.default, local[node], "sum", group, like=node)
                else:
                    gather = collectives.all_gather_into_tensor.default
                    started = call(gather, local[node], tokens.ranks, group, like=node)
                whole = call(collectives.wait_tensor.default, started, like=node)
                if value(whole).shape != value(node).shape:
                    whole = call(aten.view.default, whole, list(value(node).shape), like=node)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in chosen, propagate_meta=False)
    replaced = [collective for node in chosen if (collective := _collective(node))]
    for node in (*reversed(chosen), *replaced):
        graph.erase_node(node)


def _local(node: fx.Node, tokens: Tokens, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """This rank's tokens of ``node``, written at the insertion point."""
    if _collective(node) is not None:
        return _scatter(node, tokens)
    for argument in node.all_input_nodes:
        if argument not in local and token_count(value(argument)) == tokens.count:
            local[argument] = _chunk(argument, tokens, like=node)
    return write_local(node, tokens, local)


def _scatter(source: fx.Node, tokens: Tokens) -> fx.Node:
    """This rank's tokens of what ``source``, an all-reduce or an all-gather, gives all ranks."""
    started: Any = _collective(source)
    given = started.args[0]
    rows = tokens.count if started.target is collectives.all_reduce.default else tokens.here
    with source.graph.inserting_before(started):
        flat = as_matrix(given, rows, like=started)
        if rows == tokens.here:
            return flat
        _, reduce_op, group = started.args
        scatter = call(collectives.reduce_scatter_tensor.default, flat, reduce_op, tokens.ranks, group, like=started)
    return call(collectives.wait_tensor.default, scatter, like=source)


def _chunk(node: fx.Node, tokens: Tokens, like: fx.Node) -> fx.Node:
    """This rank's tokens of a value that every rank has whole."""
    start = tokens.rank * tokens.here
    return call(aten.slice.Tensor, as_matrix(node, tokens.count, like), 0, start, start + tokens.here, like=like)

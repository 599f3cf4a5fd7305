"""Rewrite a tensor-parallel graph to sequence parallelism: norms and residuals run on a rank's tokens.

All-reduce + (add) + norm becomes reduce-scatter + (add) + norm + all-gather. The communicated bytes are the same. The
operators in between compute and save 1 / ranks of the tokens.

A minimum cut selects these operators. After a collective, each token-wise operator may run on local tokens. A value
that another operator needs for all tokens is gathered once. The cut gathers the fewest bytes; among equal cuts, the
last one is taken. As a result, a residual stays local from layer to layer, and a replicated addend is chunked
(Qwen3-VL's deepstack). An all-gather before a norm, as after the experts of a MoE, moves behind the norm.
"""

from __future__ import annotations

from typing import Any

import networkx
import torch
from torch import fx

from torchtitan_npu.compile.passes.graph_utils import (
    as_matrix,
    aten,
    call,
    chunk_of,
    collectives,
    is_returned,
    value,
    waited,
)
from torchtitan_npu.compile.passes.simple import no_ops
from torchtitan_npu.compile.passes.token_wise_ops import (
    Tokens,
    is_local_chunk,
    is_local_split,
    is_norm,
    is_pointwise,
    is_sum_over_tokens,
    is_token_wise,
    token_count,
    write_local,
)
from torchtitan_npu.torch_internals.distributed import process_group
from torchtitan_npu.torch_internals.inductor import is_input_of_region

LOCAL, REPLICATED = "local", "replicated"  # the two sides of the cut: this rank's tokens, all tokens


def sequence_parallel(graph: fx.Graph, min_tokens: int = 1000, replicated_inputs: bool = False) -> int:
    """Rewrite ``graph`` and return the number of all-reduces split and all-gathers moved.

    A value must have at least ``min_tokens`` tokens, divisible by the number of ranks. With fewer, starting another
    collective costs more than the rewrite saves. Training needs the joint graph: in a forward graph, saved values are
    outputs with all tokens. With ``replicated_inputs``, the caller guarantees that inputs are the same on every rank
    (see :func:`_replicated`).
    """
    layouts: dict[tuple[Any, int], list[fx.Node]] = {}
    for node in graph.nodes:
        started = _collective(node)
        count = token_count(value(node))
        if started is None or count is None or count < min_tokens or not value(node).is_contiguous():
            continue
        group: Any = started.args[2]
        if process_group(group).size() > 1 and count % process_group(group).size() == 0:
            layouts.setdefault((group, count), []).append(node)
    if layouts:
        no_ops(graph)  # no-ops may separate a collective from a norm
    changed = 0
    for (group, count), sources in layouts.items():
        ranks = process_group(group)
        changed += _split(graph, group, Tokens(count, ranks.size(), ranks.rank()), sources, replicated_inputs)
    return changed


def _collective(node: fx.Node) -> fx.Node | None:
    """Return the all-reduce or all-gather whose result is ``node``. Both give every rank all tokens."""
    return waited(node, collectives.all_reduce.default) or waited(node, collectives.all_gather_into_tensor.default)


def _split(graph: fx.Graph, group: Any, tokens: Tokens, sources: list[fx.Node], replicated_inputs: bool) -> int:
    """Rewrite the operators after ``sources``, which are collectives of one group with one number of tokens."""
    replicated = _replicated(graph, group, tokens, replicated_inputs)
    users = [node for node in graph.nodes if node not in sources and replicated.issuperset(node.all_input_nodes)]
    chunks = {
        node
        for node in graph.nodes
        if is_local_chunk(node, tokens) and chunk_of(node).source in replicated  # type: ignore[union-attr]
    }
    ends = chunks | {node for node in users if is_sum_over_tokens(node, tokens)}
    splits = {node.args[0] for node in chunks if is_local_split(node.args[0], tokens)}
    candidates = ends | splits | {node for node in users if is_token_wise(node, tokens)}
    chosen = _worthwhile(_cut(sources, candidates, ends), tokens)
    if chosen:
        _rewrite(graph, group, tokens, chosen)
    return sum(source in chosen for source in sources)


def _replicated(graph: fx.Graph, group: Any, tokens: Tokens, replicated_inputs: bool) -> set[fx.Node]:
    """Return the values that are the same on every rank of ``group``. Only these can be chunked and gathered again.

    Results of all-reduces and all-gathers are replicated, and so are values computed token-wise from replicated ones.
    The graph does not say whether an input is. With ``replicated_inputs``, activations (``tokens``) and vectors (gamma)
    are taken as replicated; a matrix may be a shard.
    """
    replicated: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            same = (
                replicated_inputs
                and is_input_of_region(node)
                and (value(node).dim() < 2 or token_count(value(node)) == tokens.count)
            )
        elif (started := _collective(node)) is not None:
            same = started.args[2] == group
        else:
            same = replicated.issuperset(node.all_input_nodes) and (is_pointwise(node) or is_token_wise(node, tokens))
        if same:
            replicated.add(node)
    return replicated


def _cut(sources: list[fx.Node], candidates: set[fx.Node], ends: set[fx.Node]) -> list[fx.Node]:
    """Return the ``sources`` and ``candidates`` to run on local tokens, in the graph's order.

    ``ends`` are candidates whose results have no tokens to gather: this rank's chunks, and sums over tokens.
    """
    flow = networkx.DiGraph()  # an edge without capacity cannot be cut
    flow.add_nodes_from((LOCAL, REPLICATED))
    for node in (*sources, *candidates):
        if node in sources:
            flow.add_edge(LOCAL, node)
        if node in ends:
            continue
        if not isinstance(
            value(node), torch.Tensor
        ):  # an operator with several outputs is on the same side as they are
            for output in node.users:
                flow.add_edge(node, output if output in candidates else REPLICATED)
                flow.add_edge(output, node)
            continue
        gathered = (node, "gathered")
        if value(node).is_contiguous():
            flow.add_edge(node, gathered, capacity=value(node).shape[-1] * value(node).element_size())
        else:
            flow.add_edge(node, gathered)
        for user in node.users:
            flow.add_edge(gathered, user if user in candidates else REPLICATED)
    # networkx returns the smallest sink side: among minimum cuts, the last one
    local, _ = networkx.minimum_cut(flow, LOCAL, REPLICATED)[1]
    chosen: dict[fx.Node, None] = {}
    for node in sorted(node for node in local if isinstance(node, fx.Node)):
        if node in sources or any(argument in chosen for argument in node.all_input_nodes):
            chosen[node] = None
    return list(chosen)


def _worthwhile(nodes: list[fx.Node], tokens: Tokens) -> dict[fx.Node, None]:
    """Return the ``nodes`` that connect a collective with a norm or with a chunk of this rank's tokens.

    The rewrite gains nothing for other nodes. A gathered value does not connect: its users can take their chunk of it.
    """
    links = networkx.Graph()
    links.add_nodes_from(nodes)
    for node in nodes:
        if all(user in links for user in node.users):
            links.add_edges_from((node, user) for user in node.users)
    worthwhile: set[fx.Node] = set()
    for component in networkx.connected_components(links):
        gains = any(is_norm(node) or is_local_chunk(node, tokens) for node in component)
        if gains and any(_collective(node) for node in component):
            worthwhile |= component
    return {node: None for node in nodes if node in worthwhile}


def _rewrite(graph: fx.Graph, group: Any, tokens: Tokens, chosen: dict[fx.Node, None]) -> None:
    """Write ``chosen`` for local tokens, gather the values that other nodes need, and erase the originals."""
    local: dict[fx.Node, fx.Node] = {}  # the local value of each node
    for node in chosen:
        others = [user for user in node.users if user not in chosen]
        with graph.inserting_before(node):
            if is_local_split(node, tokens):
                continue
            if is_local_chunk(node, tokens):
                chunk: Any = chunk_of(node)
                result = call(aten.view.default, local[chunk.source], list(value(node).shape), like=node)
                if is_returned(node):  # the output must not become an alias of an input
                    result = call(aten.clone.default, result, like=node)
            else:
                local[node] = _local(node, tokens, local)
                if not others or not isinstance(value(node), torch.Tensor):
                    continue
                if is_sum_over_tokens(node, tokens):
                    started = call(collectives.all_reduce.default, local[node], "sum", group, like=node)
                else:
                    gather = collectives.all_gather_into_tensor.default
                    started = call(gather, local[node], tokens.ranks, group, like=node)
                result = call(collectives.wait_tensor.default, started, like=node)
                if value(result).shape != value(node).shape:
                    result = call(aten.view.default, result, list(value(node).shape), like=node)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in chosen, propagate_meta=False)
    replaced = [collective for node in chosen if (collective := _collective(node))]
    for node in (*reversed(chosen), *replaced):
        graph.erase_node(node)


def _local(node: fx.Node, tokens: Tokens, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """Write ``node`` for this rank's tokens at the insertion point."""
    if _collective(node) is not None:
        return _scatter(node, tokens)
    for argument in node.all_input_nodes:
        if argument not in local and token_count(value(argument)) == tokens.count:
            local[argument] = _chunk(argument, tokens, like=node)
    return write_local(node, tokens, local)


def _scatter(source: fx.Node, tokens: Tokens) -> fx.Node:
    """Write this rank's tokens of ``source``, the result of an all-reduce or an all-gather."""
    started: Any = _collective(source)
    argument = started.args[0]
    rows = tokens.count if started.target is collectives.all_reduce.default else tokens.local
    with source.graph.inserting_before(started):
        flat = as_matrix(argument, rows, like=started)
        if rows == tokens.local:
            return flat
        _, reduce_op, group = started.args
        scatter = call(collectives.reduce_scatter_tensor.default, flat, reduce_op, tokens.ranks, group, like=started)
    return call(collectives.wait_tensor.default, scatter, like=source)


def _chunk(node: fx.Node, tokens: Tokens, like: fx.Node) -> fx.Node:
    """Write the chunk of a replicated value with this rank's tokens."""
    start = tokens.rank * tokens.local
    return call(aten.slice.Tensor, as_matrix(node, tokens.count, like), 0, start, start + tokens.local, like=like)

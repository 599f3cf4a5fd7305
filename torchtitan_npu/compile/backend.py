"""The compile backend: a graph is captured, differentiated, cut into forward and backward; the kernels stay eager's.

Of Inductor nothing is used. Its wrapper, with every operator an extern call, takes the host longer than eager does; and
on an NPU torch_npu's part of it, which is loaded with it, changes how all of the process is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import default_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse

from torchtitan_npu.compile.launcher import launcher
from torchtitan_npu.compile.tidy import tidy

Pass = Callable[[fx.GraphModule], None]
"""Changes a graph in place."""


def bypassing(joint_passes: Sequence[Pass] = (), graph_passes: Sequence[Pass] = ()) -> Callable[..., Any]:
    """A backend for :func:`torch.compile` that generates no kernels.

    ``joint_passes`` change the graph of forward and backward together, ``graph_passes`` each of the two by itself.
    """

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for change in (*joint_passes, tidy):
            change(joint)
        joint.recompile()
        # saves what eager saves. The cut that needs the least memory computes more than once what a generated kernel
        # would compute on the way; here each of these is a launch
        return default_partition(joint, *args, **kwargs)

    def compile_graph(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[[list[Any]], Any]:
        graph_module.graph = fx_graph_cse(graph_module.graph)
        for change in (*graph_passes, tidy):
            change(graph_module)
        return launcher(graph_module)

    return aot_autograd(fw_compiler=compile_graph, partition_fn=partition)


bypassed = bypassing()

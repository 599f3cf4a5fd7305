"""Section ``[parallelism]``: degrees against the number of ranks and the model. pipeline.py has the pipeline keys."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass

from torchtitan.config.job_config import Parallelism as TitanParallelism

from torchtitan_npu.config.allowed import LINE, NAME, Allowed, ListOf, Number

DEGREE = Number(1)
ALLOWED: dict[str, Allowed] = {
    "data_parallel_replicate_degree": DEGREE,
    "data_parallel_shard_degree": Number(1, also=(-1,)),
    "context_parallel_degree": DEGREE,
    "tensor_parallel_degree": DEGREE,
    "pipeline_parallel_degree": DEGREE,
    "expert_parallel_degree": DEGREE,
    "expert_tensor_parallel_degree": DEGREE,
    "module_fqns_per_model_part": ListOf(ListOf(NAME)),
    "pipeline_parallel_first_stage_less_layers": Number(0, 1000),
    "pipeline_parallel_last_stage_less_layers": Number(0, 1000),
    "pipeline_parallel_layers_per_stage": Number(1),
    "pipeline_parallel_schedule": NAME,
    "pipeline_parallel_schedule_csv": LINE,
    "pipeline_parallel_microbatch_size": Number(1),
    "context_parallel_load_balancer": LINE,
}


@dataclass
class Parallelism(TitanParallelism):
    def __post_init__(self) -> None:
        # TorchTitan expects None for "no load balancing", which TOML cannot express
        if self.context_parallel_load_balancer == "":  # type: ignore[has-type]
            self.context_parallel_load_balancer = None
        super().__post_init__()

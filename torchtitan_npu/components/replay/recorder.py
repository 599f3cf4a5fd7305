"""Record the decisions of a job."""

from __future__ import annotations

import shutil

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_npu.components.replay.record_files import (
    HEADER,
    KINDS,
    KindOfRank,
    StepWriter,
    dtype,
    header_difference,
    read_header,
    recorded_steps,
    step_folder,
    width,
    write_header,
)
from torchtitan_npu.components.replay.session import Session, by_sequence, shifted_keys
from torchtitan_npu.dist_utils import gather, new_file_group
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.routing_decisions import RoutingDecisions
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.torch_internals.autograd import in_backward_pass


class Recorder(Session):
    """Write the decisions of every training step. They are not kept in memory."""

    writer: StepWriter | None = None
    is_recording = False
    ranks: int
    """Number of ranks that write."""

    def start(self) -> None:
        group = new_file_group() if dist.is_initialized() else None
        problems = gather(self._prepare_folder() if self.rank == 0 else "", group)
        if problems[0]:
            raise UsageError(f"replay.record {self.folder}: {problems[0]}")
        self.ranks = sum(gather(any(map(self.owns, self.decisions)), group))
        log_on_first_rank(f"replay: the decisions of each step are recorded in {self.folder}")

    def _prepare_folder(self) -> str:
        """Write the header, and delete later steps of a job that this one continues. Return a problem, if any."""
        try:
            if (self.folder / HEADER).exists():
                if self.step == 1:
                    return "the folder has a record already; choose another one"
                if difference := header_difference(read_header(self.folder), self.header):
                    return f"the record cannot be continued: {difference}"
                for step in recorded_steps(self.folder):
                    if step >= self.step:
                        shutil.rmtree(step_folder(self.folder, step))
            write_header(self.folder, self.header)
        except (OSError, UsageError) as error:
            return str(error)
        return ""

    def start_step(self, step: int) -> None:
        self.is_recording = step != self.step  # a step that runs again has been recorded
        super().start_step(step)

    def start_batch(self, tokens: Tensor, positions: Tensor | None, document_ends: Tensor | None) -> None:
        super().start_batch(tokens, positions, document_ends)
        if not self.is_recording:
            return
        if self.writer is None:
            kinds = {kind: part for kind in KINDS if (part := self._kind(kind)) is not None}
            if not kinds:  # a tensor-parallel rank whose decisions another one records, or a stage without decisions
                return
            rows = len(tokens) * self.batches_per_step
            self.writer = StepWriter(step_folder(self.folder, self.step), self.rank, self.ranks, rows, kinds)
        self.writer.sequences += [name for name, _ in self.sequences]

    def _kind(self, kind: str) -> KindOfRank | None:
        own = [decisions for decisions in self.decisions if decisions.kind == kind and self.owns(decisions)]
        if not own:
            return None
        header = self.header["choices"][kind]
        layers = [decisions.layer for decisions in own]
        return KindOfRank(layers, self.positions_of(own[0]), width(header), dtype(kind, header["out_of"]))

    def choose(self, decisions: RoutingDecisions, own: Tensor, query_positions: Tensor | None) -> Tensor:
        if self.writer is not None and self.owns(decisions) and not in_backward_pass():
            positions = self.positions_of(decisions)
            values = by_sequence(own, len(positions))
            if query_positions is not None:
                values = shifted_keys(
                    values, torch.as_tensor(positions, device=query_positions.device) - query_positions
                )
            part = self.writer.kinds[decisions.kind]
            first = self.first_row + self.rows(len(values)).start
            narrow = values[..., : part.width].cpu().numpy().astype(part.dtype)
            self.writer.write(decisions.kind, decisions.layer, first, narrow)
        return own.clone()

    def end_step(self) -> None:
        self.is_recording = False
        if self.writer is not None:
            self.writer.close()
            self.writer = None

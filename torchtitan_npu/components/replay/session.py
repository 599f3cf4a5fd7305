"""The session of a job: which batch runs now, and what to do with the decisions of a layer."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims

from torchtitan_npu.components.replay.record_files import (
    HEADER,
    KINDS,
    KindOfRank,
    StepWriter,
    dtype,
    header_difference,
    header_of,
    read_header,
    recorded_steps,
    sequence_hash,
    step_folder,
    width,
    write_header,
)
from torchtitan_npu.config.job_config import JobConfig, with_all_sections
from torchtitan_npu.dist_utils import gather, new_file_group
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import positions_in_documents
from torchtitan_npu.layers.routing_decisions import RoutingDecisions, routing_decisions_of
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.torch_internals.autograd import in_backward_pass


class ReplaySession:
    """The base of :class:`Recorder` and :class:`Replayer`: the sequences and tokens of the batch that runs.

    The decisions of a layer belong to the current microbatch, in the forward pass and in its recomputation. A pipeline
    stage names it (:meth:`running`), otherwise a batch is one microbatch.
    """

    def __init__(
        self,
        folder: str,
        job_config: JobConfig,
        dims: ParallelDims,
        model_parts: Sequence[nn.Module],
        model_args: Any,
        batches_per_step: int,
    ) -> None:
        self.folder = Path(folder)
        self.job_config = job_config
        self.dims = dims
        self.model_args = model_args
        self.batches_per_step = batches_per_step
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.decisions = [decisions for part in model_parts for decisions in routing_decisions_of(part)]
        for decisions in self.decisions:
            decisions.session = self
        self.header: Any = None
        self.step = 0
        self.sequences: list[tuple[str, int]] = []
        """(hash, occurrence index) of each sequence in the current batch."""
        self.first_row = 0
        """The index in the step of the first of them."""
        self.in_batch = False
        """True in a forward and backward pass of training, false in a validation."""
        self.microbatch: int | None = None
        self.positions = np.empty(0, dtype=np.int64)
        """Positions in the sequence of this rank's tokens."""
        self.first_keys = np.empty((0, 0), dtype=np.int64)
        """(bsz, seqlen) of the current batch: the first position that each token sees, that of its document."""
        self.occurrences: Counter[str] = Counter()

    def start_step(self, step: int) -> None:
        """Start a training step, or start it again."""
        self.step = step
        self.first_row = 0
        self.sequences = []
        self.occurrences.clear()
        if self.header is None:
            stages = gather(layers_of(self.decisions), None)
            layers = {kind: {n: sizes for stage in stages for n, sizes in stage[kind].items()} for kind in KINDS}
            self.header = job_header(self.job_config, self.model_args, layers)
            self.start()

    def start(self) -> None:
        """Check or prepare the folder before the first step. Collective."""
        raise NotImplementedError

    def start_batch(self, tokens: Tensor, positions: Tensor | None, document_ends: Tensor | None) -> None:
        """Start a forward and backward pass on ``tokens`` (bsz, seqlen).

        ``positions`` (bsz, tokens of this rank) are those of context parallel. ``document_ends`` (bsz, seqlen) marks
        the last tokens of documents, if tokens attend only to their document.
        """
        if not self.step:  # a dry run, without values
            return
        self.first_row += len(self.sequences)
        self.sequences = []
        for row in tokens.cpu().numpy():
            name = sequence_hash(row)
            self.sequences.append((name, self.occurrences[name]))
            self.occurrences[name] += 1
        self.positions = np.arange(tokens.shape[1]) if positions is None else positions[0].cpu().numpy()
        self.first_keys = np.zeros(tokens.shape, dtype=np.int64)
        if document_ends is not None:
            self.first_keys += np.arange(tokens.shape[1]) - positions_in_documents(document_ends).cpu().numpy()
        self.in_batch = True
        self.microbatch = None if self.dims.pp_enabled else 0

    def end_batch(self) -> None:
        self.in_batch = False
        self.microbatch = None

    def end_step(self) -> None:
        """Complete the step."""

    @contextmanager
    def running(self, microbatch: int) -> Iterator[None]:
        """Run the forward or backward pass of one microbatch of a pipeline."""
        self.microbatch = microbatch if self.in_batch else None
        try:
            yield
        finally:
            self.microbatch = None

    @property
    def runs_now(self) -> bool:
        """True in the forward or backward pass of a training step."""
        return self.microbatch is not None

    replays_now = False
    """True if the decisions of the current batch are those of a record."""

    def choose(self, decisions: RoutingDecisions, made: Tensor, query_positions: Tensor | None) -> Tensor:
        """Return the decisions to use in place of ``made``: see :meth:`RoutingDecisions.forward`."""
        raise NotImplementedError

    def recorded(self, decisions: RoutingDecisions, query_positions: Tensor) -> Tensor:
        """Return the recorded keys of the current microbatch: see :meth:`RoutingDecisions.recorded_keys`."""
        raise NotImplementedError

    def positions_of(self, decisions: RoutingDecisions) -> np.ndarray:
        """Return the positions of the tokens for which this rank has the ``decisions``."""
        mesh = decisions.token_mesh
        return self.positions if mesh is None else np.array_split(self.positions, mesh.size())[mesh.get_local_rank()]

    def owns(self, decisions: RoutingDecisions) -> bool:
        """Return whether this rank is the one that records or compares its ``decisions``.

        Tensor-parallel ranks with the same tokens make the same decisions.
        """
        tensor_parallel = self.dims.get_optional_mesh("tp")
        is_first = tensor_parallel is None or tensor_parallel.get_local_rank() == 0
        return is_first or decisions.token_mesh is not None

    def rows(self, microbatch_rows: int) -> slice:
        """Return the sequences of the current microbatch, among those of the batch."""
        assert self.microbatch is not None
        first = self.microbatch * microbatch_rows
        return slice(first, first + microbatch_rows)


Layers = dict[str, dict[int, tuple[int, int]]]
"""For each kind of decision, (number of decisions, out of how many) by layer."""


def layers_of(decisions: Sequence[RoutingDecisions]) -> Layers:
    return {kind: {each.layer: (each.top_k, each.out_of) for each in decisions if each.kind == kind} for kind in KINDS}


def job_header(job_config: JobConfig, model_args: Any, layers: Layers) -> Any:
    """Return the header of a record of this job. A job with another header cannot replay it."""
    model = {name: getattr(model_args, name, None) for name in ("n_layers", "dim", "vocab_size")}
    model |= {"name": job_config.model.name, "document_mask": with_all_sections(job_config).dsa.document_mask}
    return header_of(model, job_config.training.seq_len, layers)


def by_sequence(values: Tensor, tokens: int) -> Tensor:
    """Return decisions with the shape (sequences, tokens, top_k)."""
    return values.reshape(-1, tokens, values.shape[-1])


def shifted_keys(keys: Tensor, by: Tensor) -> Tensor:
    """Add ``by`` (sequences, tokens) to the indices of keys (sequences, tokens, top_k), except to those for no key."""
    return torch.where(keys < 0, keys, keys + by.unsqueeze(-1).to(keys.dtype))


class Recorder(ReplaySession):
    """Write the decisions of every training step. They do not stay in memory."""

    writer: StepWriter | None = None
    is_recording = False
    ranks: int
    """Number of ranks that write."""

    def start(self) -> None:
        group = new_file_group() if dist.is_initialized() else None
        problem, *_ = gather(self._prepare_folder() if self.rank == 0 else "", group)
        if problem:
            raise UsageError(f"replay.record {self.folder}: {problem}")
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
            kinds = {}
            for kind in KINDS:
                if found := [each for each in self.decisions if each.kind == kind and self.owns(each)]:
                    layers, header = [decisions.layer for decisions in found], self.header["choices"][kind]
                    of_rank = self.positions_of(found[0])
                    kinds[kind] = KindOfRank(layers, of_rank, width(header), dtype(kind, header["out_of"]))
            if not kinds:  # a tensor-parallel rank whose decisions another one records, or a stage without decisions
                return
            rows = len(tokens) * self.batches_per_step
            self.writer = StepWriter(step_folder(self.folder, self.step), self.rank, self.ranks, rows, kinds)
        self.writer.sequences += [name for name, _ in self.sequences]

    def choose(self, decisions: RoutingDecisions, made: Tensor, query_positions: Tensor | None) -> Tensor:
        if self.writer is not None and self.owns(decisions) and not in_backward_pass():
            positions = self.positions_of(decisions)
            values = by_sequence(made, len(positions))
            if query_positions is not None:
                offset = torch.as_tensor(positions, device=query_positions.device) - query_positions
                values = shifted_keys(values, offset)
            part = self.writer.kinds[decisions.kind]
            first = self.first_row + self.rows(len(values)).start
            narrow = values[..., : part.width].cpu().numpy().astype(part.dtype)
            self.writer.write(decisions.kind, decisions.layer, first, narrow)
        return made.clone()

    def end_step(self) -> None:
        self.is_recording = False
        if self.writer is not None:
            self.writer.close()
            self.writer = None

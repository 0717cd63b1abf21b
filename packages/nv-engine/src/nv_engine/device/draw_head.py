"""DrawHead: hidden states become logits, and logits the next tokens and log-probabilities.

Owns the order of that, from the logits through the controls and the draw (`nk.sample`) to the ring,
and which rows of a step count. Never decides which rows sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import nv_kernels as nk
import torch
from torch import Tensor

from nv_engine.batch import Batch
from nv_engine.device.draw_result import DrawResult, PromptResult, asked_logprobs
from nv_engine.device.head import Outputs
from nv_engine.device.inputs import Layout, StepInputs
from nv_engine.device.logprobs import prompt_logprobs, prompt_rows
from nv_engine.device.ring import ResultRing
from nv_engine.device.sampling_flags import SamplingFlags
from nv_engine.device.sampling_tables import SamplingTables


class DrawHead:
    """A token for each row of a step.

    Args:
        logits: hidden states [R, E] and perhaps the rows' adapters -> logits [R, V].
        tables: what the sequences in the slots ask of the draw.
        ring: where the tokens go.
    """

    def __init__(
        self,
        logits: Callable[[Tensor, nk.LoraPlan | None], Tensor],
        tables: SamplingTables,
        ring: ResultRing,
    ) -> None:
        self.logits = logits
        self.tables = tables
        self.ring = ring

    def update(self, batch: Batch) -> bool:
        """Take in parameters and masks; True if a table moved."""
        return self.tables.update(batch)

    def work(self, batch: Batch) -> "DrawWork":
        """The draws of a batch."""
        return DrawWork(self, batch)

    def expect_idle_step(self) -> None:
        """Pass over the ring's next entry."""
        self.ring.expect(1)

    def resync(self) -> None:
        """Count the entries that the device has written; waits for it."""
        self.ring.resync()


class DrawWork:
    """The draws of one batch, and the log-probabilities that its sequences ask for.

    Those of drawn tokens are made by the step, for every row. Those of prompts are looked up
    beside it, in a number that no layout bounds: such a batch runs eagerly.
    """

    def __init__(self, head: DrawHead, batch: Batch) -> None:
        tables = head.tables
        self.key = tables.flags(batch.chunks)
        self._head = head
        self._batch = batch
        self._prompt = prompt_rows(batch.chunks, tables.prompts) if tables.prompts else None

    @property
    def is_capturable(self) -> bool:
        """False if prompts or many log-probabilities are looked up."""
        return self._prompt is None and not self.key.many_logprobs

    def compute(
        self,
        hidden_TE: Tensor,
        rows: nk.StepRows,
        step: StepInputs,
        layout: Layout,
        lora: nk.LoraPlan | None = None,
    ) -> Outputs:
        """Draw from the logits of each row's last token; returns as `sample`."""
        head, flags = self._head, self.key
        last_SE = hidden_TE if layout.only_single_tokens else hidden_TE[rows.last]
        if lora is not None and not layout.only_single_tokens:
            lora = lora.of_rows(rows.last)
        logits_SV, sampling = head.logits(last_SE, lora), flags.sampling(rows)
        return sample(logits_SV, head.tables, step.drawn_slots_S, sampling, flags, ring=head.ring)

    def finish(
        self,
        row_numbers: Sequence[int],
        outputs: Outputs,
        hidden_TE: Tensor | None = None,
        lora: nk.LoraPlan | None = None,
    ) -> DrawResult:
        """Look up prompt tokens, and queue the copies to the host."""
        prompt = self._look_up(hidden_TE, lora)
        chunks, tables = self._batch.chunks, self._head.tables
        numbered = list(zip(row_numbers, chunks, strict=True))
        rows = [row for row, chunk in numbered if chunk.samples]
        return DrawResult(
            self._head.ring.expect(self._batch.num_steps),
            rows,
            outputs,
            asked_logprobs(chunks, rows, tables.logprobs if outputs else {}),
            prompt,
            silent={row: chunk.slot for row, chunk in numbered if not chunk.samples},
            failed=tables.failed,
        )

    def _look_up(self, hidden_TE: Tensor | None, lora: nk.LoraPlan | None) -> PromptResult | None:
        """Log-probabilities of the prompts of sequences that ask, as far as this step goes."""
        if self._prompt is None:
            return None
        assert hidden_TE is not None, "such a batch is not captured"
        head = self._head
        size = head.tables.vocab_size
        top = prompt_logprobs(hidden_TE, head.logits, self._prompt, size, lora)
        return PromptResult(top, self._prompt.spans)


def sample(
    logits_RV: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    sampling: nk.SamplingTensors,
    flags: SamplingFlags,
    *,
    ring: ResultRing,
) -> Outputs:
    """Draw a token for each row, remember it in the row's slot and send it to the host.

    Args:
        logits_RV: raw logits, any float type.
        tables: what the sequences in the slots ask for.
        slots_R: int64 slot of each row.
        sampling: the rows' parameters; positions are the rows' lengths.
        flags: what the rows ask for.
        ring: where the tokens go.

    Returns:
        The tensors of TopLogprobs, [R, ...] each, where log-probabilities are asked for; else none.
    """
    shaped_RV = logits_RV
    if flags.any_min_tokens or any(flags.controls):
        controls = controls_of(tables, slots_R, sampling.positions, flags)
        shaped_RV = nk.shape_logits(logits_RV, controls)
    ids_R = nk.sample(shaped_RV, sampling)
    if flags.controls.past:  # twice, so that no row's draw depends on what another names
        every_R = nk.sample(shaped_RV, replace(sampling, num_ids=None))
        ids_R = torch.where(tables.controls.past.rows(slots_R), every_R, ids_R)
    nk.keep_tokens(ids_R, slots_R, tables.rows.last_token, ring.tokens)
    if flags.num_logprobs is None and not any(flags.controls):
        return ()
    ids_R = ids_R.clamp(min=0)  # NO_TOKEN is for the host alone: it is not an index
    tables.controls.note(slots_R, ids_R, flags.controls)
    if flags.num_logprobs is None:
        return ()
    return nk.top_logprobs(logits_RV, ids_R, flags.num_logprobs)


def controls_of(
    tables: SamplingTables, slots_R: Tensor, lengths_R: Tensor, flags: SamplingFlags
) -> nk.LogitControls:
    """The tables of the controls that some row asks for."""
    read = tables.controls.read(flags.controls)
    if flags.any_min_tokens:
        read |= {"stop_ids": tables.stop_ids, "min_lengths": tables.min_lengths}
    return nk.LogitControls(slots_R, lengths_R, **read)

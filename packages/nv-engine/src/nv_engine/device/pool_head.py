"""PoolHead: hidden states become embeddings or class values. No logits, no draw.

Owns which states a prompt's result is made of, and what the prompts in the slots ask for. Never
computes a value (`nv_models.Pooler` does), never reads one back.
"""

from collections.abc import Sequence
from typing import NamedTuple

import nv_kernels as nk
import torch
from nv_models import Pooler
from nv_models.pooling.pooler_config import Pooling
from torch import Tensor

from nv_engine.batch import Admission, Batch
from nv_engine.device.head import Outputs
from nv_engine.device.inputs import Layout, StepInputs, count_decodes
from nv_engine.device.pool_result import PoolResult, PoolRow
from nv_engine.device.upload import upload

POOLS = "pools"
POOLS_TOKENS = "pools tokens"
"""Keys of a batch's work: without results of tokens, and with them."""


class _Asked(NamedTuple):
    """Parameters of the prompt in a slot, as the host reads them."""

    width: int
    is_of_tokens: bool


class PoolHead:
    """A result for each prompt that ends in a step, or for each of its tokens.

    A prompt may come in several chunks. The last token's state needs nothing of the earlier ones. A
    mean needs their sum, and the first token's state must be kept: a row of each slot holds it.

    Args:
        pooler: states to values.
        num_slots: slots of sequences; one more is for padding rows.
        device: where steps run.
    """

    def __init__(self, pooler: Pooler, num_slots: int, device: torch.device) -> None:
        config = pooler.config
        self.pooler = pooler
        self.device = device
        self.padding = num_slots
        rows, width = num_slots + 1, config.hidden_size if config.reads_whole_prompt else 0
        self.kept = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.asked = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        """Of each slot: values to keep, and 1 if they are activated."""
        self._asked: dict[int, _Asked] = {}

    def update(self, batch: Batch) -> bool:
        """Take in what new prompts ask for; no table ever moves."""
        if batch.admissions:
            slots = [admission.slot for admission in batch.admissions]
            asked = [self._take(admission) for admission in batch.admissions]
            rows = upload(slots, torch.int64, self.device)
            self.asked[rows] = upload(asked, torch.int64, self.device)
        return False

    def _take(self, admission: Admission) -> tuple[int, int]:
        """Note what a prompt asks for; returns its row of `asked`."""
        params, config = admission.pooling, self.pooler.config
        assert params is not None, "an engine draws or pools"
        width = params.dimensions or config.width
        self._asked[admission.slot] = _Asked(width, params.is_of_tokens)
        given = params.use_activation
        return width, int(config.activates if given is None else given)

    def work(self, batch: Batch) -> "PoolWork":
        """The results of a batch."""
        return PoolWork(self, batch, [self._asked[chunk.slot] for chunk in batch.chunks])

    def expect_idle_step(self) -> None:
        """Nothing counts steps."""

    def resync(self) -> None:
        """Nothing counts steps."""

    def states(
        self, hidden_TE: Tensor, last_SE: Tensor, rows: nk.StepRows, step: StepInputs
    ) -> Tensor:
        """The state [S, E] of each row's prompt, as far as it is computed, and kept if need be."""
        if self.pooler.config.pooling is Pooling.LAST:
            return last_SE
        slots_S, is_first_S1 = step.slots_S, (step.starts_S == 0)[:, None]
        before_SE = self.kept[slots_S]
        if self.pooler.config.pooling is Pooling.CLS:
            # A padding row may begin past the last token.
            first_S = rows.query_start[:-1].clamp(max=len(hidden_TE) - 1)
            firsts_SE = hidden_TE[first_S].float()
            state_SE = torch.where(is_first_S1, firsts_SE, before_SE)
            self.kept[slots_S] = state_SE
            return state_SE
        # A sum of each row alone: with a product by a matrix of ones and zeros, a row with NaN
        # would spoil all others.
        added_SE = torch.segment_reduce(
            hidden_TE.float(), "sum", offsets=rows.query_start, axis=0, unsafe=True, initial=0.0
        )
        sum_SE = torch.where(is_first_S1, added_SE, before_SE + added_SE)
        self.kept[slots_S] = sum_SE
        return sum_SE / rows.context_lens[:, None]

    def results(
        self, states_NE: Tensor, slots_N: Tensor, adapters_N: Tensor | None = None
    ) -> Tensor:
        """States [N, E] of prompts or tokens in slots [N] -> results [N, width] fp32.

        With `adapters_N` the adapters of some change the classifier.
        """
        values_NO, asked_N2 = self.pooler(states_NE, adapters_N), self.asked[slots_N]
        columns_O = torch.arange(values_NO.shape[1], device=self.device)
        cut_NO = torch.where(columns_O < asked_N2[:, :1], values_NO, 0.0)
        return torch.where(asked_N2[:, 1:] == 1, self.pooler.activate(cut_NO), cut_NO)


class PoolWork:
    """The results of one batch."""

    is_capturable = True

    def __init__(self, head: PoolHead, batch: Batch, asked: Sequence[_Asked]) -> None:
        self.key = POOLS_TOKENS if any(each.is_of_tokens for each in asked) else POOLS
        self._head = head
        self._batch = batch
        self._asked = asked

    def compute(
        self,
        hidden_TE: Tensor,
        rows: nk.StepRows,
        step: StepInputs,
        layout: Layout,
        lora: nk.LoraPlan | None = None,
    ) -> Outputs:
        """Results [S, width] of prompts, whether each row is finite [S], and those of tokens.

        The last are [T, width]; they are there if a prompt of the batch asks for them.
        """
        head, adapters_T = self._head, None if lora is None else lora.adapters
        last_SE = hidden_TE if layout.only_single_tokens else hidden_TE[rows.last]
        adapters_S = adapters_T
        if adapters_T is not None and not layout.only_single_tokens:
            adapters_S = adapters_T[rows.last]
        states_SE = head.states(hidden_TE, last_SE, rows, step)
        results_SO = head.results(states_SE, step.slots_S, adapters_S)
        is_finite_S = last_SE.isfinite().all(1) & results_SO.isfinite().all(1)
        if self.key == POOLS:
            return results_SO, is_finite_S
        slots_T = self._slots_of_tokens(rows, step, layout)
        return results_SO, is_finite_S, head.results(hidden_TE, slots_T, adapters_T)

    def _slots_of_tokens(self, rows: nk.StepRows, step: StepInputs, layout: Layout) -> Tensor:
        """The slot [T] of each token; the padding slot for tokens of no row."""
        ends_S, device = rows.query_start[1:].contiguous(), self._head.device
        tokens_T = torch.arange(layout.num_tokens, dtype=ends_S.dtype, device=device)
        row_T = torch.searchsorted(ends_S, tokens_T, right=True)
        padding_1 = step.slots_S.new_full((1,), self._head.padding)
        return torch.cat([step.slots_S, padding_1])[row_T]

    def finish(
        self,
        row_numbers: Sequence[int],
        outputs: Outputs,
        hidden_TE: Tensor | None = None,
        lora: nk.LoraPlan | None = None,
    ) -> PoolResult:
        """Queue the copies to the host."""
        del hidden_TE, lora
        chunks = self._batch.chunks
        num_decodes = count_decodes(chunks)
        first = row_numbers[num_decodes] if num_decodes < len(chunks) else 0
        wanted: list[PoolRow] = []
        for place, (chunk, row, asked) in enumerate(
            zip(chunks, row_numbers, self._asked, strict=True)
        ):
            token, count = place, 1  # rows of one token are first, and are their token
            if place >= num_decodes:
                token, count = first, chunk.num_tokens
                first += count
            span = slice(token, token + count) if asked.is_of_tokens else None
            wanted.append(PoolRow(chunk.slot, row, asked.width, chunk.samples, span))
        return PoolResult(wanted, [part[0] for part in outputs])

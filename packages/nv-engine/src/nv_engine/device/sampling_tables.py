"""SamplingTables: what the sequence in each slot asks of the draw.

Owns sampling parameters and stop ids on the device, and on the host which slots ask for
log-probabilities (what few requests use is in control_tables). Never draws, and never reads a value
back.
"""

from collections.abc import Sequence

import torch
from nv_kernels import RowTables
from torch import Tensor

from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.device.control_tables import ControlTables
from nv_engine.device.logprobs import PromptRequest
from nv_engine.device.sampling_flags import SamplingFlags
from nv_engine.device.upload import upload
from nv_engine.values import MAX_COUNT

SMALLEST = 1e-30
"""Least top_p on the device: smaller ones keep one token, as this does."""
NUM_STOP_IDS = 16
"""Stop ids a row can hold at first; more make the table grow."""
STOP_BYTES = 8 * NUM_STOP_IDS
"""Bytes on the device per slot, beside the slot's own; controls apart."""


class SamplingTables:
    """The parameters of the draw, by slot.

    Args:
        rows: the slots' rows, whose `floats` and `integers` these are; the last one is padding.
        vocab_size: columns of the logits.
        eos_token_ids: no sequence draws them before its min_tokens.
        num_ids: ids from here on are drawn only for requests that name them; None: all are.
    """

    def __init__(
        self,
        rows: RowTables,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        num_ids: int | None = None,
    ) -> None:
        num_rows, device = len(rows.last_token), rows.last_token.device
        self.rows = rows
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_ids = num_ids
        self._device = device
        self.stop_ids = torch.zeros(num_rows, NUM_STOP_IDS, dtype=torch.int64, device=device)
        self.controls = ControlTables(num_rows - 1, vocab_size, device, num_ids=num_ids)
        self.failed: dict[int, str] = {}
        """Of the newest batch, by slot: why a sequence's parameters could not be taken in. It runs
        without them, and its tokens mean nothing."""
        self.logprobs: dict[int, int] = {}  # by slot, of those that ask: how many
        self.prompts: dict[int, PromptRequest] = {}  # likewise
        self._filter = [False] * num_rows
        self._min_length = [0] * num_rows

    def update(self, batch: Batch) -> bool:
        """Apply a batch's admissions and masks, in that order.

        Returns:
            True if a table moved in memory, so that a graph that read it is stale.
        """
        before, moved = self.stop_ids, False
        self.failed = {}
        if batch.admissions:
            self._admit(batch.admissions)
            moved = self.controls.admit(batch.admissions, self.failed)
        if batch.masks:
            self.controls.mask(batch.masks)
        return moved or self.stop_ids is not before

    def flags(self, chunks: Sequence[Chunk]) -> SamplingFlags:
        """The flags of the sampling rows among `chunks`."""
        rows = [chunk for chunk in chunks if chunk.samples]
        is_plain = not self.controls.in_use and not self.logprobs
        slots = () if is_plain else [chunk.slot for chunk in rows]
        return SamplingFlags(
            any_filter=any(self._filter[chunk.slot] for chunk in rows),
            any_min_tokens=any(
                chunk.start + chunk.num_tokens < self._min_length[chunk.slot] for chunk in rows
            ),
            controls=self.controls.flags(slots),
            num_ids=self._num_ids,
            num_logprobs=self._most_logprobs(slots),
        )

    @property
    def min_lengths(self) -> Tensor:
        """Length of each slot, prompt included, below which it may not stop: [N] int64."""
        return self.rows.integers[:, 2]

    def _admit(self, admissions: Sequence[Admission]) -> None:
        floats, integers, stops = [], [], []
        for admission in admissions:
            slot, params = admission.slot, admission.params
            least = min(params.min_tokens, MAX_COUNT - admission.prompt_len)
            min_length = admission.prompt_len + least if least else 0
            top_p = max(params.top_p, SMALLEST)  # fp32 would make it 0, which keeps nothing
            floats.append((params.temperature, top_p, params.min_p))
            integers.append((max(params.top_k, 0), _signed(admission.seed), min_length))
            if least:  # the others' are not read
                stops.append((slot, self._stop_ids(admission)))
            self._filter[slot] = not params.greedy and (
                params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            )
            self._min_length[slot] = min_length
            self._note_logprobs(admission)
        self._set_stop_ids(stops)
        rows = self._tensor([admission.slot for admission in admissions])
        self.rows.floats[rows] = self._tensor(floats, torch.float32)
        self.rows.integers[rows] = self._tensor(integers)

    def _set_stop_ids(self, stops: Sequence[tuple[int, list[int]]]) -> None:
        """Write the stop ids of some slots."""
        if not stops:
            return
        self._widen(max(len(ids) for _, ids in stops))
        width = self.stop_ids.shape[1]
        padded = [ids + ids[:1] * (width - len(ids)) for _, ids in stops]
        rows = self._tensor([slot for slot, _ in stops])
        self.stop_ids[rows] = self._tensor(padded)

    def _note_logprobs(self, admission: Admission) -> None:
        """Remember, on the host alone, whose log-probabilities are wanted."""
        slot, wanted = admission.slot, admission.params.logprobs
        if wanted is not None:
            self.logprobs[slot] = self._num_logprobs(wanted)
        elif slot in self.logprobs:
            del self.logprobs[slot]
        wanted = admission.prompt_logprobs
        if wanted is not None:
            prompt = admission.token_ids[: admission.prompt_len]
            self.prompts[slot] = PromptRequest(prompt, self._num_logprobs(wanted))
        elif slot in self.prompts:
            del self.prompts[slot]

    def _num_logprobs(self, wanted: int) -> int:
        return self.vocab_size if wanted == -1 else min(wanted, self.vocab_size)

    def _most_logprobs(self, slots: Sequence[int]) -> int | None:
        """The most that one of `slots` asks for, rounded up so that few graphs are captured."""
        asked = [self.logprobs[slot] for slot in slots if slot in self.logprobs]
        if not asked:
            return None
        most = max(asked)
        return min(1 << (most - 1).bit_length(), self.vocab_size) if most else 0

    def _stop_ids(self, admission: Admission) -> list[int]:
        """Ids that may not be drawn before min_tokens; at least one entry, to pad the row with."""
        ids = dict.fromkeys((*self._eos_token_ids, *(admission.params.stop_token_ids or ())))
        return list(ids) or [0]

    def _widen(self, width: int) -> None:
        """Make room for rows with more stop ids: the new columns repeat the first."""
        more = width - self.stop_ids.shape[1]
        if more > 0:
            self.stop_ids = torch.cat(
                [self.stop_ids, self.stop_ids[:, :1].expand(-1, more)], dim=1
            ).contiguous()

    def _tensor(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(values, dtype, self._device)


def _signed(key: int) -> int:
    """The int64 with the same bits as a 64-bit key."""
    return key - 2**64 if key >= 2**63 else key

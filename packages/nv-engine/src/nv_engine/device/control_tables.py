"""ControlTables: what the controls of each running sequence need on the device, by slot.

Owns masks, allowed tokens, words, biases, penalties, counts and recent tokens. Never changes a
logit. A table has rows up to the highest slot that asked for it, so a control costs memory only
where it is used: beside its first row nothing is there until then, and a table that grows moves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nv_engine.batch import Admission, TokenMask
from nv_engine.device.sampling_flags import NO_CONTROLS, ControlFlags
from nv_engine.device.upload import upload
from nv_engine.params import SamplingParams

ANY = -1
"""In a table of words: no token here, so that every token fits."""
MIN_ROWS = 8
MOST_REPETITION = 1e20
"""Larger penalties, and smaller ones than 1 over this, act as it does: logits stay finite."""
TABLES = {
    "allowed": ("allowed",),
    "words": ("words", "recent"),
    "bias": ("bias_ids", "bias_values"),
    "penalties": ("repetition", "additive", "counts"),
    "grammar": ("masks",),
    "past": ("past",),
}
"""Of each flag of ControlFlags: fields of ControlTables, which but `past` nk.LogitControls has."""


class SlotTable:
    """[n + 1, ...]: the rows of slots 0 .. n - 1, and one that stands for all others.

    A row that was not written is neutral: its control does nothing.
    """

    def __init__(
        self,
        num_slots: int,
        shape: tuple[int, ...],
        neutral: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_slots = num_slots
        self._neutral = neutral
        self.data = torch.full((1, *shape), neutral, dtype=dtype, device=device)

    def fit(self, slot: int, *shape: int) -> None:
        """Make a row for `slot`, and every row at least as large as `shape`."""
        old = self.data
        num_rows = len(old) - 1
        if slot >= num_rows:
            num_rows = min(max(MIN_ROWS, 2 * num_rows, slot + 1), self._num_slots)
        sizes = [max(size, least) for size, least in zip(old.shape[1:], shape, strict=True)]
        if [num_rows + 1, *sizes] == list(old.shape):
            return
        grown = old.new_full((num_rows + 1, *sizes), self._neutral)
        grown[tuple(map(slice, (len(old) - 1, *old.shape[1:])))] = old[:-1]
        self.data = grown  # whole: an exception before leaves the old rows

    def clear(self, slot: int) -> None:
        """Make a row neutral, if the slot has one."""
        self.data[slot : min(slot + 1, len(self.data) - 1)].fill_(self._neutral)

    def index(self, slots_R: Tensor) -> Tensor:
        """Row of each slot: [R] int64."""
        return slots_R.clamp(max=len(self.data) - 1)

    def rows(self, slots_R: Tensor) -> Tensor:
        """Rows of the slots: [R, ...]."""
        return self.data[self.index(slots_R)]


class ControlTables:
    """The tables, and on the host which slots use them."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        num_ids: int | None = None,
    ) -> None:
        def table(shape: tuple[int, ...], neutral: float, dtype: torch.dtype) -> SlotTable:
            return SlotTable(num_slots, shape, neutral, dtype, device)

        self.allowed = table((vocab_size,), True, torch.bool)
        self.words = table((0, 1), ANY, torch.int64)
        self.recent = table((0,), ANY, torch.int64)
        self.bias_ids = table((0,), ANY, torch.int64)
        self.bias_values = table((0,), 0.0, torch.float32)
        self.repetition = table((), 1.0, torch.float32)
        self.additive = table((2,), 0.0, torch.float32)  # frequency, presence
        self.counts = table((vocab_size,), 0, torch.int32)  # see nk.LogitControls
        self.masks = table((-(-vocab_size // 32),), -1, torch.int32)
        self.past = table((), False, torch.bool)
        self._device = device
        self._num_ids = num_ids
        self._asked: dict[int, ControlFlags] = {}  # by slot; a finished one's until the next's

    def admit(self, admissions: Sequence[Admission], failed: dict[int, str]) -> bool:
        """Take in what the admitted sequences ask for.

        Args:
            admissions: of the sequences that have a slot from now on.
            failed: gains, by slot, why something could not be taken in: such a slot asks for
                nothing.

        Returns:
            True if a table moved in memory.
        """
        asked = [(admission, flags_of(admission.params, self._num_ids)) for admission in admissions]
        asked = [
            (admission, flags)
            for admission, flags in asked
            if flags is not NO_CONTROLS or admission.slot in self._asked
        ]
        if not asked:
            return False
        before = [table.data for table in self._all]
        for admission, flags in asked:
            self._clear(admission.slot)
            if flags is not NO_CONTROLS:
                self._asked[admission.slot] = flags
                try:
                    self._set(admission, flags)
                except RuntimeError as error:  # torch's: no memory for a larger table, or an upload
                    self._clear(admission.slot)
                    failed[admission.slot] = f"its parameters could not be taken in: {error}"
        return any(table.data is not data for table, data in zip(self._all, before, strict=True))

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """Take in what sequences with a grammar may draw next, if their slots have a row."""
        masks = [mask for mask in masks if self._asked.get(mask.slot, NO_CONTROLS).grammar]
        if not masks:
            return
        bits = torch.frombuffer(bytearray().join([mask.bits for mask in masks]), dtype=torch.int32)
        rows = self._ids([mask.slot for mask in masks])
        bits_RW = upload(bits, torch.int32, self._device)
        self.masks.data[rows] = bits_RW.view(len(masks), -1)

    @property
    def in_use(self) -> bool:
        """False if no slot's sequence asks for anything."""
        return bool(self._asked)

    @property
    def num_bytes(self) -> int:
        """Bytes that the tables take now."""
        return sum(table.data.nbytes for table in self._all)

    def flags(self, slots: Sequence[int]) -> ControlFlags:
        """The controls that any sequence in `slots` asks for."""
        asked = [self._asked[slot] for slot in slots if slot in self._asked]
        return ControlFlags(*map(any, zip(*asked, strict=True))) if asked else NO_CONTROLS

    def read(self, flags: ControlFlags) -> dict[str, Tensor]:
        """The tables that a step's controls read, by their name in nk.LogitControls."""
        names = _names(flags._replace(past=False))
        return {name: getattr(self, name).data for name in names}

    def note(self, slots_R: Tensor, ids_R: Tensor, flags: ControlFlags) -> None:
        """Remember drawn tokens, as far as controls look back at them. All device work."""
        if flags.penalties:
            counts = self.counts.data
            flat_R = self.counts.index(slots_R) * counts.shape[1] + ids_R
            twos_R = torch.full_like(ids_R, 2, dtype=counts.dtype)
            counts.view(-1).scatter_add_(0, flat_R, twos_R)
        if flags.words:
            recent = self.recent.data
            newest_RW = torch.cat([ids_R[:, None], self.recent.rows(slots_R)], dim=1)
            recent[self.recent.index(slots_R)] = newest_RW[:, : recent.shape[1]]

    @property
    def _all(self) -> tuple[SlotTable, ...]:
        return tuple(getattr(self, name) for names in TABLES.values() for name in names)

    def _clear(self, slot: int) -> None:
        """Make neutral what an earlier sequence in the slot had.

        The slot is forgotten last: after an exception midway it is cleared again before its next
        sequence.
        """
        for name in _names(self._asked.get(slot, NO_CONTROLS)):
            getattr(self, name).clear(slot)
        self._asked.pop(slot, None)

    def _set(self, admission: Admission, flags: ControlFlags) -> None:
        if flags.allowed:
            self._set_allowed(admission)
        if flags.words:
            self._set_words(admission)
        if flags.bias:
            self._set_bias(admission)
        if flags.penalties:
            self._set_penalties(admission)
        if flags.grammar:
            self.masks.fit(admission.slot, *self.masks.data.shape[1:])
        if flags.past:
            self.past.fit(admission.slot)
            self.past.data[admission.slot].fill_(True)

    def _set_allowed(self, admission: Admission) -> None:
        self.allowed.fit(admission.slot, *self.allowed.data.shape[1:])
        row_V = self.allowed.data[admission.slot].fill_(False)
        if admission.params.allowed_token_ids is None:
            row_V[: self._num_ids].fill_(True)
        row_V.index_fill_(0, self._ids(named_ids(admission.params)), True)

    def _set_words(self, admission: Admission) -> None:
        slot, words = admission.slot, admission.params.bad_words_token_ids or ()
        longest = max(map(len, words))
        self.words.fit(slot, len(words), longest)
        self.recent.fit(slot, self.words.data.shape[2] - 1)
        padded = [[*word[::-1], *[ANY] * (longest - len(word))] for word in words]
        self.words.data[slot, : len(words), :longest] = self._ids(padded)
        drawn = admission.token_ids[admission.prompt_len :][::-1]
        num_recent = self.recent.data.shape[1]
        newest = [*drawn[:num_recent], *[ANY] * (num_recent - len(drawn))]
        self.recent.data[slot] = self._ids(newest)

    def _set_bias(self, admission: Admission) -> None:
        slot, bias = admission.slot, admission.params.logit_bias or {}
        self.bias_ids.fit(slot, len(bias))
        self.bias_values.fit(slot, len(bias))
        self.bias_ids.data[slot, : len(bias)] = self._ids(list(bias))
        self.bias_values.data[slot, : len(bias)] = self._floats(list(bias.values()))

    def _set_penalties(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        self.repetition.fit(slot)
        self.additive.fit(slot, 2)
        self.counts.fit(slot, *self.counts.data.shape[1:])
        penalty = min(max(params.repetition_penalty, 1 / MOST_REPETITION), MOST_REPETITION)
        self.repetition.data[slot].fill_(penalty)
        self.additive.data[slot] = self._floats([params.frequency_penalty, params.presence_penalty])
        known_N = self._ids(admission.token_ids)
        prompt_P, drawn_D = known_N.tensor_split([admission.prompt_len])
        row_V = self.counts.data[slot].zero_().index_fill_(0, prompt_P, 1)
        row_V.scatter_add_(0, drawn_D, torch.full_like(drawn_D, 2, dtype=row_V.dtype))

    def _ids(self, ids: object) -> Tensor:
        return upload(ids, torch.int64, self._device)

    def _floats(self, values: object) -> Tensor:
        return upload(values, torch.float32, self._device)


def _names(flags: ControlFlags) -> Iterator[str]:
    """The tables of the flags that are set."""
    return (name for flag, asked in flags._asdict().items() if asked for name in TABLES[flag])


def named_ids(params: SamplingParams) -> list[int]:
    """Ids that a request wants drawn, wherever the tokenizer's end."""
    if params.allowed_token_ids is not None:
        return params.allowed_token_ids
    return [token for token, bias in (params.logit_bias or {}).items() if bias > 0]


def flags_of(params: SamplingParams, num_ids: int | None = None) -> ControlFlags:
    """The controls that one request asks for; NO_CONTROLS itself if none.

    One that names ids from `num_ids` on may draw these, and no others from there on.
    """
    past = num_ids is not None and any(token >= num_ids for token in named_ids(params))
    flags = ControlFlags(
        allowed=params.allowed_token_ids is not None or past,
        words=bool(params.bad_words_token_ids),
        bias=bool(params.logit_bias),
        penalties=(
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        ),
        grammar=params.structured_outputs is not None,
        past=past,
    )
    return flags if any(flags) else NO_CONTROLS

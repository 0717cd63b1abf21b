"""Logprobs: log-probabilities of tokens and of the most likely ones, on their way to the host.

Owns which prompt tokens are looked up, and how tensors become plain values. What they are,
`nk.reference.top_logprobs` defines, of raw logits: never of what a control made of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import nv_kernels as nk
import torch
from torch import Tensor

from nv_engine.batch import Chunk, TokenLogprobs
from nv_engine.device.upload import upload

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

MAX_PART = 2**24
"""Logits looked at together: what is made of them, in fp32, takes 64 MiB."""


class PromptRequest(NamedTuple):
    """A sequence in a slot whose prompt's log-probabilities are wanted."""

    token_ids: tuple[int, ...]
    """The prompt."""
    num_logprobs: int


class TopLogprobs(NamedTuple):
    """Tensors of N tokens, each with the K most likely tokens in its place."""

    token_ids: Tensor
    """[..., N, K + 1] int64: the token itself, then the most likely, best first."""
    logprobs: Tensor
    """[..., N, K + 1] fp32."""
    ranks: Tensor
    """[..., N] int64: of the token itself."""


@dataclass(frozen=True)
class PromptRows:
    """The prompt tokens of a step whose log-probabilities are wanted."""

    rows: list[int]
    """Of the step's T tokens: those that the wanted ones follow."""
    targets: list[int]
    """The wanted tokens."""
    spans: list[tuple[int, int, int]]
    """Slot, number of targets and num_logprobs of each sequence, in order."""

    @property
    def num_logprobs(self) -> int:
        """The most that one of them asks for."""
        return max(num_logprobs for _, _, num_logprobs in self.spans)


def row_parts(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cut rows of logits so that a part has at most MAX_PART values (and at least a row)."""
    size = max(1, MAX_PART // vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def prompt_rows(chunks: Sequence[Chunk], requests: dict[int, PromptRequest]) -> PromptRows | None:
    """Find the prompt tokens whose predecessors a step computes; None if none is wanted."""
    rows: list[int] = []
    targets: list[int] = []
    spans: list[tuple[int, int, int]] = []
    first = 0
    for chunk in chunks:
        request = requests.get(chunk.slot)
        if request is not None:
            wanted = request.token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
            rows += range(first, first + len(wanted))
            targets += wanted
            spans += [(chunk.slot, len(wanted), request.num_logprobs)] if wanted else []
        first += chunk.num_tokens
    return PromptRows(rows, targets, spans) if spans else None


def prompt_logprobs(
    hidden_TE: Tensor,
    logits_of: Callable[[Tensor, nk.LoraPlan | None], Tensor],
    wanted: PromptRows,
    vocab_size: int,
    lora: nk.LoraPlan | None = None,
) -> TopLogprobs:
    """Look up prompt tokens; logits are made, and forgotten, a part at a time."""
    device = hidden_TE.device
    rows_N = upload(wanted.rows, torch.int64, device)
    targets_N = upload(wanted.targets, torch.int64, device)

    def look_up(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        rows = rows_N[part]
        logits = logits_of(hidden_TE[rows], None if lora is None else lora.of_rows(rows))
        return nk.top_logprobs(logits, targets_N[part], wanted.num_logprobs)

    parts = [look_up(part) for part in row_parts(len(wanted.rows), vocab_size)]
    return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))


class RowLogprobs(Sequence[TokenLogprobs]):
    """One sequence's log-probabilities in a step: a view of the step's, plain values when read.

    Lists for every row would be made, and walked over by Python's collector, at each step.

    Args:
        step: tensors of the host, [num_steps, rows, ...] each.
        row: its own.
        count: most likely tokens that it asked for.
    """

    __slots__ = ("_count", "_row", "_step")

    def __init__(self, step: tuple[Array, ...], row: int, count: int) -> None:
        self._step, self._row, self._count = step, row, count

    def __len__(self) -> int:
        """Tokens."""
        return len(self._step[0])

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        """Read one token's, or some."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        token_ids, logprobs, ranks = self._step
        row, width = self._row, self._count + 1
        own, values = token_ids[index, row, :width], logprobs[index, row, :width]
        return TokenLogprobs(own.tolist(), values.tolist(), int(ranks[index, row]))


def plain(top: TopLogprobs, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Plain values of N tokens, `counts[i]` most likely ones for the i-th.

    Args:
        top: tensors of the host, without leading dimensions.
        counts: N numbers.
    """
    step = tuple(part[None].numpy() for part in top)
    return [RowLogprobs(step, row, count)[0] for row, count in enumerate(counts)]

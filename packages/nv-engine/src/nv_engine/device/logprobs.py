"""Logprobs: log-probabilities of tokens and of the most likely ones, from raw logits.

Owns their definition and their way into plain values. Never sees what a control or a temperature
made of the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nv_engine.batch import Chunk, TokenLogprobs
from nv_engine.device.upload import upload

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


def top_logprobs(
    logits_NV: Tensor, ids_N: Tensor, num_logprobs: int, *, deterministic: bool = False
) -> TopLogprobs:
    """Look up tokens and the most likely ones. All device work.

    A token's rank is 1 plus the number of tokens that are more likely.

    Args:
        logits_NV: raw logits, any float type.
        ids_N: int64 tokens.
        num_logprobs: K, at most V.
        deterministic: a row's result depends on its logits alone: of equally likely tokens the
            lowest ids are the first. Else which of them are found depends on N and K.
    """
    parts = []
    if deterministic:  # a card sums rows that begin at a multiple of 16 bytes in one order
        logits_NV = functional.pad(logits_NV, (0, -logits_NV.shape[1] % 16), value=-torch.inf)
    for part in row_parts(*logits_NV.shape):
        logprobs_PV = torch.log_softmax(logits_NV[part], dim=-1, dtype=torch.float32)
        ids_P1 = ids_N[part, None]
        own_P1 = logprobs_PV.gather(1, ids_P1)
        ranks_P = (logprobs_PV > own_P1).sum(-1) + 1
        find = _top_by_id if deterministic else _top
        top_PK, top_ids_PK = find(logprobs_PV, num_logprobs)
        parts.append(
            (torch.cat([ids_P1, top_ids_PK], dim=1), torch.cat([own_P1, top_PK], dim=1), ranks_P)
        )
    return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _top(logprobs_PV: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor]:
    """The K highest and their ids."""
    top_PK, top_ids_PK = logprobs_PV.topk(num_logprobs, dim=-1)
    return top_PK, top_ids_PK


def _top_by_id(logprobs_PV: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor]:
    """The K highest and their ids, the lowest ids first among equals.

    Log-probabilities are at most 0, so that the bits of the nearer to 0 are the lower number: bits
    and id together are a key of which no two are equal.
    """
    bits_PV = logprobs_PV.abs().view(torch.int32).long()
    keys_PV = (bits_PV << 32) + torch.arange(logprobs_PV.shape[1], device=logprobs_PV.device)
    keys_PK = keys_PV.topk(num_logprobs, dim=-1, largest=False).values
    top_ids_PK = keys_PK & 0xFFFFFFFF
    return logprobs_PV.gather(1, top_ids_PK), top_ids_PK


def prompt_rows(chunks: Sequence[Chunk], requests: dict[int, PromptRequest]) -> PromptRows | None:
    """Find the prompt tokens whose predecessors a step computes; None if nobody wants any."""
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
    logits_of: Callable[[Tensor], Tensor],
    wanted: PromptRows,
    vocab_size: int,
    find: Callable[[Tensor, Tensor, int], TopLogprobs] = top_logprobs,
) -> TopLogprobs:
    """Look up prompt tokens; logits are made, and forgotten, a part at a time."""
    device = hidden_TE.device
    rows_N = upload(wanted.rows, torch.int64, device)
    targets_N = upload(wanted.targets, torch.int64, device)
    parts = [
        find(logits_of(hidden_TE[rows_N[part]]), targets_N[part], wanted.num_logprobs)
        for part in row_parts(len(wanted.rows), vocab_size)
    ]
    return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def plain(top: TopLogprobs, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Plain values of N tokens, `counts[i]` most likely ones for the i-th.

    Args:
        top: tensors of the host, without leading dimensions.
        counts: N numbers.
    """
    columns = zip(*(part.tolist() for part in top), counts, strict=True)
    return [
        TokenLogprobs(token_ids[: count + 1], logprobs[: count + 1], rank)
        for token_ids, logprobs, rank, count in columns
    ]

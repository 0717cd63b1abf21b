"""The frozen message from the host's wing to the device's: what one step computes, in plain tuples.

Owns nothing; names no tensor. A batch is a list of chunks: decoding is a chunk of one token.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nv_engine.adapter import AdapterSource
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import PoolingParams

NO_ADAPTER = -1
"""In place of a slot of the adapters' pool: the base model alone."""
NO_TOKEN = -1
"""In place of a drawn token: the row's logits hold NaN or infinity, or all are -inf."""


class Admission(NamedTuple):
    """A sequence takes a slot (first time, or again after preemption)."""

    slot: int
    params: SamplingParams
    seed: int
    """64-bit key of every draw of this sequence."""
    prompt_len: int
    token_ids: tuple[int, ...]
    """Prompt and what was generated so far (penalties count them)."""
    prompt_logprobs: int | None = None
    """Most likely tokens to return for each token of the prompt; None: not asked for."""
    pooling: PoolingParams | None = None
    """The result that is made of the prompt's hidden states; None: tokens are drawn."""
    adapter: int = NO_ADAPTER
    """The slot of its adapter in the pool."""


class AdapterFetch(NamedTuple):
    """A rank's slices of an adapter go from its files to the host's memory, beside the steps."""

    image: int
    """Where they go; nothing else needs what is there."""
    source: AdapterSource


class AdapterLoad(NamedTuple):
    """An adapter goes from the host's memory to a slot of the pool, before the step computes."""

    slot: int
    image: int
    key: int


class BlockAppend(NamedTuple):
    """Block ids appended to a slot's block table, from entry `first` on."""

    slot: int
    first: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """The first `num_tokens` tokens of a block go to another, before the step computes."""

    source: int
    destination: int
    num_tokens: int


class TokenMask(NamedTuple):
    """The tokens that a slot's sequence may draw next."""

    slot: int
    bits: bytes
    """One bit per token, lowest first, in ceil(V / 32) * 4 bytes."""


class Chunk(NamedTuple):
    """Some tokens of one sequence: positions start .. start + num_tokens."""

    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    """The tokens, or () for the one token that the slot sampled last and keeps on the device."""
    samples: bool
    """True if the chunk reaches the sequence's end, so that the next token is drawn (a pooling
    sequence: so that its result is there)."""


class Batch(NamedTuple):
    """One step, or a burst of `num_steps` equal decode steps in which every row samples."""

    chunks: tuple[Chunk, ...]
    admissions: tuple[Admission, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    num_steps: int = 1
    masks: tuple[TokenMask, ...] = ()
    """Of the sequences with a grammar that sample in this step."""
    fetches: tuple[AdapterFetch, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in each of the steps."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, from the raw logits: a token's and the most likely ones'.

    Natural logarithms; no control and no temperature is in them.
    """

    token_ids: list[int]
    """The token itself, then the most likely ones, best first (the token may be among them)."""
    logprobs: list[float]
    rank: int
    """Of the token itself: 1 plus the number of tokens that are more likely."""


class PooledRows(NamedTuple):
    """Results of pooling: a row for a prompt, or one for each of its tokens."""

    width: int
    """Values of a row."""
    values: bytes
    """fp32 in the machine's byte order, row after row."""


class StepResult(NamedTuple):
    """The tokens that a step drew, and all else that the device reports of it."""

    token_ids: list[list[int]]
    """token_ids[step][i], for the i-th chunk that samples; NO_TOKEN: there was nothing to draw."""
    logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None
    """By slot, one per step, of the sequences that asked for them; None if none did."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None
    """By slot: of the prompt tokens that follow the ones computed in this step."""
    broken: Collection[int] = ()
    """Slots whose chunk gave logits with NaN or infinity, though it drew nothing: of a chunk that
    does not sample those of its last token, and those that prompt log-probabilities come from."""
    failed: Mapping[int, str] | None = None
    """Why, by slot: sequences whose parameters could not be taken in. Their tokens mean nothing."""
    pooled: Mapping[int, PooledRows] | None = None
    """By slot, of a step that pools and draws nothing: the result of each prompt that ends in it,
    and of the tokens of those prompts whose tokens have results. None: tokens were drawn."""
    fetched: Collection[int] = ()
    """Keys of adapters that the host's memory holds whole since the last step."""
    unfetched: Mapping[int, str] | None = None
    """Why, by key: adapters that could not be read. Sequences that ran with one are in `failed`."""

"""The results of a request: RequestOutput, CompletionOutput, Logprob.

Owns their shapes, both as nano-vLLM's dict and as vLLM's attributes. Never computes one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from nv_engine import LoRARequest


@dataclass(slots=True)
class Logprob:
    """One candidate token's log-probability, from the raw logits, before temperature.

    Where the model's vocabulary is padded, a candidate may be an id past the tokenizer's. Such ids
    are not drawn, but the raw logits have them.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most likely token; None where it was not computed.
        decoded_token: the token's own text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Candidates = list[dict[int, Logprob]]


class CandidatesOrNone:
    """An attribute that may be set to a function, which the first read calls."""

    def __get__(self, output: object | None, kind: type | None = None) -> Candidates | None:
        """Read it; of the class, the default."""
        if output is None:
            return None
        found: Candidates | Callable[[], Candidates] | None = vars(output)["_logprobs"]
        if callable(found):
            found = vars(output)["_logprobs"] = found()
        return found

    def __set__(self, output: object, found: Candidates | Callable[[], Candidates] | None) -> None:
        """Keep it as it is given."""
        vars(output)["_logprobs"] = found


@dataclass(frozen=True, init=False)
class CompletionOutput:
    """One completion of a prompt, or a delta of one (`LLM.stream`): what is new of it.

    Attributes:
        index: which of the request's `n` completions this is.
        text: the text, special tokens left out unless they were asked for; "" without a tokenizer.
        token_ids: the tokens drawn, the final EOS included.
        cumulative_logprob: sum of the drawn tokens' log-probabilities; None unless asked for.
        logprobs: a dict of candidates per token; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while the completion runs.
        stop_reason: the stop string or stop token that ended it, or the error's sentence; with
            "length" None, or why it ended before max_tokens and max_model_len.
        lora_request, routed_experts, kv_transfer_params: vLLM's; None here.
    """

    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: CandidatesOrNone = CandidatesOrNone()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __init__(  # noqa: PLR0917  # the fields, in their order
        self,
        index: int,
        text: str,
        token_ids: list[int],
        cumulative_logprob: float | None = None,
        logprobs: Candidates | Callable[[], Candidates] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        vars(self).update(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=cumulative_logprob,
            _logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "CompletionOutput":
        """One with these attributes, all of them; the dict becomes its own.

        One is made per delta, and `__init__` takes three times as long.
        """
        output = object.__new__(cls)
        object.__setattr__(output, "__dict__", fields)
        return output

    def finished(self) -> bool:
        """True once the completion has ended, for whatever reason."""
        return self.finish_reason is not None

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, for pickle and copy."""
        _ = self.logprobs  # reads them: a function cannot be pickled
        return vars(self)


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock.

    Attributes:
        arrival_time: the request was added.
        first_scheduled_time: the engine first placed one of its completions on the device; None
            until the first token, or its end, is known.
        first_token_time: its first token reached the host; None before.
        finished_time: its last completion ended; None before.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


class RequestOutput(dict[str, Any]):
    """A request's result: a dict with exactly `text` and `token_ids`, and vLLM's attributes.

    The two entries are those of the first completion: `output["text"]` is
    `output.outputs[0].text`.

    Args:
        request_id: the id that `add_request` returned, or that the user gave (`AsyncLLM`).
        prompt: the prompt's text; None where token ids were given.
        prompt_token_ids: the prompt's tokens.
        outputs: one `CompletionOutput` per completion, in order of index.
        finished: True once every completion has ended.
        prompt_logprobs: a dict of candidates per prompt token, None first; None unless asked for.
        num_cached_tokens: prompt tokens that the prefix cache had.
        metrics: times of the request's life.
        lora_request: the adapter that it was computed with; None: the base model alone.

    Attributes:
        encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: vLLM's; None
            here.
    """

    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    def __init__(
        self,
        *,
        request_id: int | str,
        prompt: str | None,
        prompt_token_ids: list[int],
        outputs: list[CompletionOutput],
        finished: bool,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
        num_cached_tokens: int = 0,
        metrics: RequestMetrics | None = None,
        lora_request: "LoRARequest | None" = None,
    ) -> None:
        super().__init__(text=outputs[0].text, token_ids=outputs[0].token_ids)
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.num_cached_tokens = num_cached_tokens
        self.metrics = metrics
        self.lora_request = lora_request

    @property
    def multi_modal_placeholders(self) -> dict[str, Any]:
        """vLLM's: where images and the like lie in the prompt; {} here."""
        return {}

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"outputs={self.outputs!r}, finished={self.finished})"
        )

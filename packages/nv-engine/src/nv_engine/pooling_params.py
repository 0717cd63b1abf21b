"""PoolingParams: what is made of the hidden states of one prompt.

Owns the fields and their bounds. Whether a model can do it is checked where the model's facts are
(`validation`). Never touches a tensor.
"""

from dataclasses import dataclass
from typing import Any

from nv_engine import values
from nv_engine.names import ForeignNames

TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
"""A vector of a prompt; its class probabilities; its one-label score; and a vector, or class
probabilities, of each of its tokens."""
EMBED_TASKS = ("embed", "token_embed")
TOKEN_TASKS = ("token_embed", "token_classify")
WHOLE_CONTEXT = -1
"""A `truncate_prompt_tokens` that keeps as many tokens as the engine's max_model_len."""

VLLM_NAMES = ForeignNames(
    no_difference=frozenset({"output_kind", "requires_token_ids"}),
    unbuilt={
        "extra_kwargs": ({},),
        "returned_token_ids": ([],),
        "skip_reading_prefix_cache": (False,),
        "step_tag_id": (),
    },
    renamed={"activation": "use_activation", "softmax": "use_activation"},
    instead={
        "extra_kwargs": "no plugin reads them: leave them out",
        "returned_token_ids": "token_classify returns every label of every token",
        "skip_reading_prefix_cache": "pass enable_prefix_caching=False to LLM",
        "step_tag_id": "token_classify returns the labels of every token: choose those of the tag",
    },
)
"""vLLM's fields that we do not have."""


@VLLM_NAMES.fields_of
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of one pooling request; names and meanings follow vLLM's `PoolingParams`.

    Raises:
        ValueError: a value is out of range; names the field, value and range.
        TypeError: a field that is unknown, or a value that is not named.
        NotImplementedError: a field of vLLM's that is not built.
    """

    dimensions: int | None = None
    """Keep only the first values of an embedding, at least 1; None: all. The cut comes before the
    norm, so that a shorter embedding has length 1 too."""
    use_activation: bool | None = None
    """Scale an embedding to length 1, or turn logits into probabilities. None: as the model's files
    ask for, True where they have no such field."""
    normalize: bool | None = None
    """Another name of `use_activation`, which takes the value; then this is None."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many of the prompt's last tokens; -1: as many as fit; None: all."""
    task: str | None = None
    """One of TASKS; None: that of the method that is called."""

    def __post_init__(self) -> None:
        fields = vars(self)
        if self.dimensions is not None:
            fields["dimensions"] = values.integer("dimensions", self.dimensions, 1)
        for name in ("use_activation", "normalize"):
            if fields[name] is not None:
                fields[name] = values.boolean(name, fields[name])
        if self.normalize is not None:
            self._merge_names(fields)
        if self.truncate_prompt_tokens is not None:
            fields["truncate_prompt_tokens"] = _kept(self.truncate_prompt_tokens)
        if self.task is not None:
            values.one_of("task", self.task, TASKS)

    def _merge_names(self, fields: dict[str, Any]) -> None:
        """Make `use_activation` of `normalize`."""
        if self.use_activation not in (None, self.normalize):
            raise ValueError(
                f"normalize is {self.normalize} and use_activation {self.use_activation}, which "
                "are one field: give one of them"
            )
        fields["use_activation"], fields["normalize"] = self.normalize, None

    @property
    def is_of_tokens(self) -> bool:
        """Whether each token of the prompt has a result."""
        return self.task in TOKEN_TASKS


def _kept(value: object) -> int:
    kept = values.integer(
        "truncate_prompt_tokens", value, WHOLE_CONTEXT, hint="-1 means as many as fit"
    )
    if kept == 0:
        raise ValueError(
            "truncate_prompt_tokens is 0: it must be at least 1, or -1 for as many as fit"
        )
    return kept

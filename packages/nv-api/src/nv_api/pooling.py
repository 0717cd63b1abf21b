"""Pooling: results made of a prompt's hidden states instead of text.

Owns the names, which are vLLM's. Pooling tasks are not built yet: each method raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from nv_api.arguments import VLLM_NAMES
from nv_api.progress import UseTqdm
from nv_api.prompts import PromptLike


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of a pooling request; names and meanings follow vLLM.

    Attributes:
        truncate_prompt_tokens: keep only this many of the prompt's last tokens; None keeps all.
        dimensions: length of an embedding (Matryoshka models); None is the model's own.
        normalize: scale an embedding to length 1; None is the model's own choice.
        task: "embed", "classify", "score", "token_embed" or "token_classify".
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    task: str | None = None


class PoolingMethods:
    """The methods of `LLM` that do not return text.

    Raises:
        NotImplementedError: each of them.
    """

    @VLLM_NAMES.arguments_of
    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: object = None,
        pooling_task: str | None = None,
    ) -> NoReturn:
        """Hidden states of prompts; not built yet."""
        _refuse("encode")

    @VLLM_NAMES.arguments_of
    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: object = None,
    ) -> NoReturn:
        """Embeddings of prompts; not built yet."""
        _refuse("embed")

    @VLLM_NAMES.arguments_of
    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: object = None,
    ) -> NoReturn:
        """Class probabilities of prompts; not built yet."""
        _refuse("classify")

    @VLLM_NAMES.arguments_of
    def score(
        self,
        data_1: PromptLike | Sequence[PromptLike],
        data_2: PromptLike | Sequence[PromptLike],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
    ) -> NoReturn:
        """Similarity of pairs of texts; not built yet."""
        _refuse("score")


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(f"{method} is not built yet: this version generates text only")

"""Pooling: the methods of `LLM` that return embeddings, class values and scores.

Owns what a user may write in a call of them, and the checks on it. Never steps the engine (the
session does) and never makes a result (the engine does).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from nv_engine import PoolingParams
from nv_engine.pooling_params import TASKS
from nv_engine.validation import no_text
from nv_engine.values import one_of, shown

from nv_api.adapters import LoRALike, with_adapters
from nv_api.arguments import POOLING_NAMES
from nv_api.pooled_request import PooledRequest
from nv_api.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledValues,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nv_api.pooling_prompts import bound_of, paired, truncated, with_prompt
from nv_api.progress import UseTqdm, check_use_tqdm
from nv_api.prompts import PromptLike, TokenPrompt, prompt_list, tokenize
from nv_api.scoring import Scoring
from nv_api.session import Session
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_models import PoolerConfig

PoolingParamsLike = PoolingParams | Sequence[PoolingParams] | None
Output = TypeVar("Output", bound=PoolingOutput)


class PoolingMethods:
    """The methods of `LLM` that do not return text.

    All prompts are checked before any work starts. An error or Ctrl-C aborts the requests of the
    call, and no others. A prompt that fails on the device has its reason in `error`; the others
    have their results.

    Raises:
        ValueError: the model does not have the task, a prompt is empty or too long, or a parameter
            does not fit the task.
        TypeError: a value that is not a prompt or PoolingParams, or an unknown argument.
    """

    _session: Session
    _tokenizer: Tokenizer | None
    _pooler: "PoolerConfig | None"

    @POOLING_NAMES.arguments_of
    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
        pooling_task: str | None = None,
        *,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Results of prompts as tensors (`outputs.data`), in their order.

        Args:
            prompts: as of `generate`.
            pooling_params: one for all prompts, or one per prompt.
            use_tqdm: as of `generate`.
            lora_request: as of `generate`.
            pooling_task: "embed", "classify", "score", "token_embed" or "token_classify"; None:
                that of the parameters.
            prompt_name: of a prompt of the model's that goes in front of each text.
        """
        requests = self._pool(
            prompts, pooling_params, use_tqdm, lora_request, pooling_task, prompt_name
        )
        return [PoolingRequestOutput(*fields(each, PoolingOutput)) for each in requests]

    @POOLING_NAMES.arguments_of
    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
        *,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts (`outputs.embedding`); arguments as `encode`."""
        requests = self._pool(prompts, pooling_params, use_tqdm, lora_request, "embed", prompt_name)
        return [EmbeddingRequestOutput(*fields(each, EmbeddingOutput)) for each in requests]

    @POOLING_NAMES.arguments_of
    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities of prompts (`outputs.probs`); arguments as `encode`."""
        requests = self._pool(prompts, pooling_params, use_tqdm, lora_request, "classify")
        return [
            ClassificationRequestOutput(*fields(each, ClassificationOutput)) for each in requests
        ]

    @POOLING_NAMES.arguments_of
    def reward(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Class values without the activation (`outputs.data`); arguments as `encode`."""
        params = pooling_params if pooling_params is not None else PoolingParams()
        listed = params if isinstance(params, Sequence) else [params]
        _check_params(listed)
        raw = [replace(each, use_activation=False) for each in listed]
        given = raw[0] if isinstance(params, PoolingParams) else raw
        requests = self._pool(prompts, given, use_tqdm, lora_request, "classify")
        return [PoolingRequestOutput(*fields(each, PoolingOutput)) for each in requests]

    @POOLING_NAMES.arguments_of
    def score(  # noqa: PLR0917  # vLLM's order
        self,
        data_1: PromptLike | Sequence[PromptLike],
        data_2: PromptLike | Sequence[PromptLike],
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRALike = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores of pairs of texts (`outputs.score`).

        An embedding model gives the cosine of the two embeddings; a classifier of one label reads
        both texts at once and gives its value.

        Args:
            data_1: one text, or as many as in `data_2`.
            data_2: a text or a list.
            use_tqdm: as of `generate`.
            pooling_params: for all pairs.
            lora_request: as of `generate`.
            chat_template: a Jinja template of a classifier's prompt, which gets two messages with
                the roles "query" and "document".
        """
        pooler = self._check(use_tqdm)
        scoring = Scoring(*paired(prompt_list(data_1), prompt_list(data_2)), pooler)
        given = with_task(pooling_params, scoring.task, scoring.num_prompts, pooler, "score")
        params = [scoring.params(each) for each in given]
        prompts = with_adapters(scoring.prompts(self._tokenizer, chat_template), lora_request)
        requests = self._run(prompts, params, use_tqdm)
        scores = scoring.scores([each.values for each in requests])
        return [
            _scored(pair, score)
            for pair, score in zip(scoring.members(requests), scores, strict=True)
        ]

    def _pool(  # noqa: PLR0917  # those of `encode`
        self,
        prompts: PromptLike | Sequence[PromptLike],
        given: PoolingParamsLike,
        use_tqdm: UseTqdm,
        lora_request: LoRALike,
        task: str | None,
        prompt_name: str | None = None,
    ) -> list[PooledRequest]:
        """Check a call, run it, and return its requests."""
        pooler = self._check(use_tqdm)
        listed = prompt_list(prompts)
        params = with_task(given, task, len(listed), pooler)
        length = bound_of(params, self._session.max_model_len)
        tokenized = tokenize(with_prompt(listed, pooler, prompt_name), self._tokenizer, length)
        return self._run(with_adapters(tokenized, lora_request), params, use_tqdm)

    def _run(
        self, prompts: list[TokenPrompt], params: list[PoolingParams], use_tqdm: UseTqdm
    ) -> list[PooledRequest]:
        kept = truncated(prompts, params, self._session.max_model_len)
        return self._session.pool(kept, params, use_tqdm)

    def _check(self, use_tqdm: UseTqdm) -> "PoolerConfig":
        check_use_tqdm(use_tqdm)
        self._session.check_usable()
        return existing_pooler(self._pooler)


def existing_pooler(pooler: "PoolerConfig | None") -> "PoolerConfig":
    """The model's pooler, which a call needs.

    Raises:
        ValueError: the model generates text.
    """
    if pooler is None:
        raise ValueError(
            'this model generates text and does not pool: load it with runner="pooling" for '
            "embeddings, or load a model that embeds or classifies"
        )
    return pooler


def refuse_pooler(pooler: "PoolerConfig | None") -> None:
    """Check that the model generates text, before a prompt is made for it.

    Raises:
        ValueError: it pools.
    """
    if pooler is not None:
        raise ValueError(no_text(pooler.tasks))


def fields(
    request: PooledRequest, kind: type[Output], name: str | int | None = None
) -> tuple[int | str, Output, list[int], int, bool, str | None]:
    """The fields of a request's output.

    Args:
        request: one that has ended.
        kind: the class of its result.
        name: the id that the user gave it; None: the engine's.
    """
    values = request.values
    number = request.request_id if name is None else name
    ids, cached = request.prompt.token_ids, request.num_cached_tokens
    return number, kind(values), ids, cached, request.finished, values.error


def _scored(pair: tuple[PooledRequest, ...], score: PooledValues) -> ScoringRequestOutput:
    """The output of a pair of texts, which has one request or two."""
    return ScoringRequestOutput(
        pair[0].request_id if len(pair) == 1 else "_".join(str(each.request_id) for each in pair),
        ScoringOutput(score),
        [token for each in pair for token in each.prompt.token_ids],
        sum(each.num_cached_tokens for each in pair),
        all(each.finished for each in pair),
        score.error,
    )


def _check_params(given: object) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(p, PoolingParams) for p in given):
        raise TypeError(
            f"pooling_params is {shown(given)}: it must be a PoolingParams, or a list of them"
        )


def with_task(
    given: PoolingParamsLike,
    task: str | None,
    num_prompts: int,
    pooler: "PoolerConfig",
    *also: str,
) -> list[PoolingParams]:
    """The parameters of each prompt, each with its task.

    Args:
        given: the user's.
        task: the call's; None: that of the parameters.
        num_prompts: how many there are.
        pooler: has the model's tasks.
        also: other tasks that the parameters may name.
    """
    if task is not None:
        one_of("pooling_task", task, TASKS)
    given = PoolingParams() if given is None else given
    listed = given if isinstance(given, Sequence) else [given] * num_prompts
    _check_params(listed)
    if len(listed) != num_prompts:
        raise ValueError(
            f"there are {num_prompts} prompts and {len(listed)} pooling_params: give one for all, "
            "or one per prompt"
        )
    params = []
    for each in listed:
        if None not in (task, each.task) and each.task not in (task, *also):
            raise ValueError(
                f"pooling_params has the task {each.task!r} and the call {task!r}: give one of them"
            )
        own = task or each.task
        if own is None:
            raise ValueError(
                f"encode needs a task: pass pooling_task=…, one of {', '.join(pooler.tasks)}"
            )
        params.append(each if each.task == own else replace(each, task=own))
    return params

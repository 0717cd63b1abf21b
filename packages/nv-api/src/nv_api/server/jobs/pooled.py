"""PooledJob: a request to a route that pools.

Owns what such requests share: parameters, their checks, truncation, and the head of a response.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from nv_engine import PoolingParams
from nv_engine.validation import check_pooling

from nv_api.pooling_outputs import PooledValues
from nv_api.pooling_prompts import truncated
from nv_api.prompts import TokenPrompt
from nv_api.server.answers.pooled import PooledWhole
from nv_api.server.errors import NO_ROOM, ApiError, invalid, refusals, unsupported
from nv_api.server.generation import Generation
from nv_api.server.jobs.job import ignored_fields
from nv_api.server.protocol.pooled import Pooled
from nv_api.server.service import Service


class PooledJob(ABC):
    """Prompts to pool.

    Args:
        asked: the request.
        task: of the model.
        service: the server's parts.
        name: of the response.
        more: parameters that not every request has.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model lacks the task.
    """

    operation: str
    field = "input"
    """Of the request: what the prompts are made of."""
    beside = ""
    """In errors: what else a prompt is made of."""

    def __init__(
        self,
        asked: Pooled,
        task: str,
        service: Service,
        name: str,
        **more: Any,  # noqa: ANN401
    ) -> None:
        _check_built(asked)
        self._service = service
        self.model, self._lora = service.model_of(asked.model)
        self.name = name
        self._salt = asked.cache_salt
        self.ignored = ignored_fields(asked)
        self.params = _params(asked, task, service, **more)

    def params_of(self, prompt: TokenPrompt) -> PoolingParams:
        """Those of every prompt."""
        return self.params

    async def explained(self, error: ApiError) -> ApiError:
        """With the request's name of the prompts."""
        return error.renamed({"prompt": self.field})

    def events(self, generation: Generation) -> None:  # noqa: B027  # the same of all kinds
        """None: a result comes in one piece."""

    def whole(self, generation: Generation) -> PooledWhole:
        """The response."""
        return PooledWhole(self.response, generation.requests)

    def response(self, results: Sequence[PooledValues]) -> dict[str, Any]:
        """The response, but for its usage; called beside the event loop."""
        return {
            "id": self.name,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": [
                {"index": index, **fields} for index, fields in enumerate(self.items(results))
            ],
        }

    @abstractmethod
    def items(self, results: Sequence[PooledValues]) -> Sequence[dict[str, Any]]:
        """Of each entry of `data`, all fields but its index."""

    @property
    def truncates(self) -> bool:
        """Whether no prompt is too long, since its last tokens are kept."""
        return self.params.truncate_prompt_tokens is not None

    def place(self, index: int, num_prompts: int) -> str:
        """The field, or its entry, that a prompt is made of."""
        return self.field if num_prompts == 1 else f"{self.field}.{index}"

    def kept(self, prompts: Sequence[TokenPrompt]) -> list[TokenPrompt]:
        """The prompts, truncated if that is asked for, with the request's salt and adapter.

        Raises:
            ApiError: 400, one is too long.
        """
        max_model_len = self._service.llm.facts.max_model_len
        with refusals(self.field):
            kept = truncated(prompts, [self.params] * len(prompts), max_model_len)
        for index, prompt in enumerate(kept):
            if len(prompt.token_ids) > max_model_len:
                place = self.place(index, len(kept))
                raise invalid(
                    f"{place}{self.beside} has {len(prompt.token_ids)} tokens and this model's "
                    f"maximum context length is {max_model_len} tokens: shorten it, or send "
                    "truncate_prompt_tokens: -1, which keeps the last ones",
                    place,
                    NO_ROOM,
                )
        return [prompt._replace(cache_salt=self._salt, lora=self._lora) for prompt in kept]


def _params(
    asked: Pooled,
    task: str,
    service: Service,
    **more: Any,  # noqa: ANN401
) -> PoolingParams:
    """The parameters of a request, which fit the model."""
    facts = service.llm.facts.pooling
    assert facts is not None, "the model pools"
    with refusals():
        params = PoolingParams(
            task=task,
            use_activation=asked.use_activation,
            normalize=asked.normalize,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            **more,
        )
        check_pooling(params, facts)
    return params


def _check_built(asked: Pooled) -> None:
    if asked.priority:
        raise unsupported(
            f"priority is {asked.priority}: requests run in their order, so leave it out",
            "priority",
        )
    if asked.mm_processor_kwargs:
        raise unsupported(
            "mm_processor_kwargs is of images and audio, which are not built: leave it out",
            "mm_processor_kwargs",
        )

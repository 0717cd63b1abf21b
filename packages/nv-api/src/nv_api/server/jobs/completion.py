"""CompletionJob: a request to /v1/completions.

Owns what its fields mean: the forms of a prompt, and the echo.
"""

import asyncio
from functools import cached_property
from typing import Any

from nv_engine import SamplingParams
from nv_engine.values import shown

from nv_api.prompts import Prompt, PromptLike, TokenPrompt, prompt_list
from nv_api.said import Place
from nv_api.said.forms import Tags
from nv_api.server.answers.completion import CompletionEvents, CompletionForm, CompletionWhole
from nv_api.server.answers.form import Head
from nv_api.server.demand import response_demand
from nv_api.server.errors import ApiError, invalid, refusals, unsupported
from nv_api.server.generation import Generation
from nv_api.server.jobs.job import ignored_fields
from nv_api.server.probabilities import TokenNames
from nv_api.server.protocol.completions import CompletionRequest
from nv_api.server.sampling import sampling_params
from nv_api.server.service import Service

MAX_TOKENS = 16
"""Where a request has none; OpenAI's."""


class CompletionJob:
    """Texts to continue.

    Args:
        asked: the request.
        service: the server's parts.
        request_id: of HTTP.

    Raises:
        ApiError: 400 or 404, a field is wrong.
    """

    def __init__(self, asked: CompletionRequest, service: Service, request_id: str) -> None:
        _check_built(asked)
        self._asked = asked
        self._service = service
        self._head = Head(
            id=f"cmpl-{request_id}",
            model=service.name_of(asked.model),
            has_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            has_running_usage=bool(
                asked.stream_options and asked.stream_options.continuous_usage_stats
            ),
            has_token_ids=bool(asked.return_token_ids),
        )
        self._prompts = _prompts(asked.prompt)
        self._is_only_echo = asked.max_tokens == 0 and bool(asked.echo)
        self.is_streamed = bool(asked.stream)
        self.ignored = ignored_fields(asked)
        self._demand = response_demand(asked, service.options)
        self.params = self._params()
        self.num_sequences = len(self._prompts) * self.params.n

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""
        with refusals("prompt"):
            if self._asked.add_special_tokens is False:
                prompts = await asyncio.to_thread(self._without_special_tokens)
            else:
                prompts = await self._service.llm.tokenize([_like(each) for each in self._prompts])
        return [prompt._replace(cache_salt=self._asked.cache_salt) for prompt in prompts]

    def params_of(self, prompt: TokenPrompt) -> SamplingParams:
        """Those of every prompt."""
        return self.params

    async def explained(self, error: ApiError) -> ApiError:
        """With the name response_format, if that is wrong."""
        sent = self.params.structured_outputs
        if self._demand is None or sent is None:
            return error
        return await self._demand.explained(error, sent)

    def events(self, generation: Generation) -> CompletionEvents:
        """The streamed answer."""
        return CompletionEvents(self._form, generation.requests, generation.usage)

    def whole(self, generation: Generation) -> CompletionWhole:
        """The answer in one piece."""
        return CompletionWhole(self._form, generation.requests)

    @cached_property
    def _form(self) -> CompletionForm:
        asked = self._asked
        names = TokenNames(self._service.llm.text, bool(asked.return_tokens_as_token_ids))
        return CompletionForm(
            head=self._head,
            names=names,
            has_logprobs=asked.logprobs is not None,
            shows_prompt_logprobs=asked.prompt_logprobs is not None,
            is_echo=bool(asked.echo),
            is_only_echo=self._is_only_echo,
            num_choices=self.params.n,
        )

    def _params(self) -> SamplingParams:
        asked = self._asked
        if asked.stream and asked.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs are not sent in a stream: leave one of them out", "prompt_logprobs"
            )
        most = MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        of_the_prompt = asked.prompt_logprobs
        if asked.echo and asked.logprobs is not None and of_the_prompt is None:
            of_the_prompt = asked.logprobs
        params = sampling_params(
            asked,
            self._service.default_params,
            self._service.options,
            max_tokens=1 if self._is_only_echo else most,
            logprobs=asked.logprobs,
            prompt_logprobs=of_the_prompt,
        )
        if self._demand is not None:
            params.structured_outputs = self._demand.params(Place.AFTER, Tags())
        return params

    def _without_special_tokens(self) -> list[TokenPrompt]:
        """The same, without the tokenizer's first and last special tokens."""
        tokenizer = self._service.llm.text
        if tokenizer is None:
            raise ValueError("prompt is text and there is no tokenizer: send token ids")
        return [
            TokenPrompt(prompt.text, prompt.token_ids)
            if prompt.token_ids is not None
            else TokenPrompt(
                prompt.text, tokenizer.encode([prompt.text or ""], add_special_tokens=False)[0]
            )
            for prompt in self._prompts
        ]


def _prompts(given: Any) -> list[Prompt]:  # noqa: ANN401
    """A text, token ids, or a list of either."""
    are_several = isinstance(given, list) and given and isinstance(given[0], str | list)
    if not isinstance(given, str) and not (isinstance(given, list) and given):
        raise invalid(
            f"prompt is {shown(given)}: it must be a text, a list of token ids, or a list of "
            "either, and not empty",
            "prompt",
        )
    for each in given if are_several else [given]:
        if not isinstance(each, str | list):
            raise invalid(
                f"prompt has {shown(each)}: every entry must be a text or a list of token ids",
                "prompt",
            )
    with refusals("prompt"):
        return prompt_list(given)


def _like(prompt: Prompt) -> PromptLike:
    """A prompt as `AsyncLLM` takes it."""
    return prompt.token_ids if prompt.token_ids is not None else prompt.text or ""


def _check_built(asked: CompletionRequest) -> None:
    """Refuse what is not built.

    Raises:
        ApiError: 400.
    """
    if asked.suffix:
        raise unsupported("suffix is not built: leave it out", "suffix")
    if asked.best_of is not None and asked.best_of > (asked.n or 1):
        raise unsupported(
            f"best_of is {asked.best_of} and n is {asked.n or 1}: more completions than n are not "
            "built, so set n and choose one yourself",
            "best_of",
        )

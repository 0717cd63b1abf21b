"""CompletionJob: a request to /v1/completions.

Owns what its fields mean, and the echo.
"""

from functools import cached_property

from nv_engine import SamplingParams

from nv_api.prompts import TokenPrompt
from nv_api.said import Place
from nv_api.said.forms import Tags
from nv_api.server.answers.completion import CompletionEvents, CompletionForm, CompletionWhole
from nv_api.server.answers.form import Head
from nv_api.server.demand import response_demand
from nv_api.server.errors import ApiError, invalid, refusals, unsupported
from nv_api.server.generation import Generation
from nv_api.server.inputs import input_list, tokenized
from nv_api.server.jobs.job import check_stream_options, ignored_fields
from nv_api.server.probabilities import TokenNames
from nv_api.server.protocol.completions import CompletionRequest
from nv_api.server.sampling import fitted, sampling_params
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

    operation = "text_completion"

    def __init__(self, asked: CompletionRequest, service: Service, request_id: str) -> None:
        _check_built(asked)
        check_stream_options(asked)
        self._asked = asked
        self._service = service
        self._model = service.model_of(asked.model)
        self._head = Head(
            id=f"cmpl-{request_id}",
            model=self._model.name,
            has_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            has_running_usage=bool(
                asked.stream_options and asked.stream_options.continuous_usage_stats
            ),
            has_token_ids=bool(asked.return_token_ids),
        )
        self._prompts = input_list(asked.prompt, "prompt")
        self._fitted: dict[int, SamplingParams] = {}
        self._is_only_echo = asked.max_tokens == 0 and bool(asked.echo)
        self.ignored = ignored_fields(asked)
        self._demand = response_demand(asked, service.options)
        self.params = self._params()
        self.num_sequences = len(self._prompts) * self.params.n

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""
        with refusals("prompt"):
            prompts = await tokenized(
                self._service.llm,
                self._prompts,
                add_special_tokens=self._asked.add_special_tokens is not False,
            )
        salt, lora = self._asked.cache_salt, self._model.lora
        return [prompt._replace(cache_salt=salt, lora=lora) for prompt in prompts]

    def params_of(self, prompt: TokenPrompt) -> SamplingParams:
        """Those of every prompt, and its length; prompts of one length share them."""
        length = len(prompt.token_ids)
        if length not in self._fitted:
            most = self._service.llm.facts.max_model_len
            self._fitted[length] = fitted(self.params, length, most)
        return self._fitted[length]

    async def explained(self, error: ApiError) -> ApiError:
        """With the name response_format, if that is wrong."""
        sent = self.params.structured_outputs
        if self._demand is None or sent is None:
            return error
        return await self._demand.explained(error, sent)

    def events(self, generation: Generation) -> CompletionEvents | None:
        """The streamed answer, if that is asked for."""
        if not self._asked.stream:
            return None
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

"""LLM: prompts in, texts out, on this thread.

Owns the public surface: names, what a user may write, and the checks on it. Never steps the engine
(the session does) and never makes text (the processor does). Not thread-safe.
"""

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from nv_engine import LoRARequest, SamplingParams

from nv_api.adapters import LoRALike, with_adapters
from nv_api.arguments import VLLM_NAMES, ParamsLike, params_list
from nv_api.chat_check import check_given
from nv_api.collector import uncollected
from nv_api.conversation import (
    Message,
    Rendering,
    chat_prompt,
    check_read,
    conversation_list,
)
from nv_api.members import OF_LLM, missing
from nv_api.one_process import OneProcess
from nv_api.outputs import CompletionOutput, RequestOutput
from nv_api.pooling import PoolingMethods, refuse_pooler
from nv_api.progress import UseTqdm, check_use_tqdm
from nv_api.prompts import PromptLike, prompt_list, single_prompt, tokenize
from nv_api.start import start
from nv_api.tokenizer import existing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(PoolingMethods, OneProcess):
    """A model that completes prompts, offline: vLLM's `LLM` and nano-vLLM's in one.

    One thread at a time may call it; a call during another thread's call raises a RuntimeError.

    Args:
        model: a folder (config.json, *.safetensors, tokenizer files), a .gguf file, a hub name
            such as "Qwen/Qwen3-0.6B", or "demo".
        **options: the fields of `nv_engine.EngineConfig` (defaults and meanings are there), and
            `tokenizer`, `tokenizer_mode`, `skip_tokenizer_init`, `trust_remote_code`. vLLM's names
            are known; those that make no difference here are accepted with one warning.

    Raises:
        FileNotFoundError: a folder or a file of the model does not exist.
        ValueError: an option or the checkpoint is out of range.
        TypeError: an unknown option; the message names the nearest known one.
        NotImplementedError: an option or a value that is not built yet.
    """

    @VLLM_NAMES.arguments_of
    def __init__(self, model: str, **options: Any) -> None:  # noqa: ANN401
        with uncollected():
            started = start(model, options)
        self._session, self._tokenizer = started.session, started.tokenizer
        self._default_params, self._pooler = started.default_params, started.pooler
        self.tokenizer: PreTrainedTokenizerBase | None = (
            self._tokenizer.backend if self._tokenizer else None
        )

    @VLLM_NAMES.arguments_of
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in the order of the prompts.

        If they do not all fit at once, those with the largest max_tokens are admitted first, so
        that the last requests do not run alone for long.

        All prompts are checked before any work starts. An error or Ctrl-C aborts the requests of
        this call, and no others.

        Args:
            prompts: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a
                list of those.
            sampling_params: one for all prompts, or one per prompt; None: the checkpoint's
                recommendation (its max_new_tokens included).
            use_tqdm: True: a progress bar; False: none; or a callable with tqdm's arguments.
            lora_request: an adapter for all prompts, or one per prompt (None: the base model
                alone); the model was loaded with enable_lora=True.

        Raises:
            ValueError: a prompt that is empty, too long or cannot run for another reason; a list
                of parameters or adapters that is not as long as the list of prompts; or an
                adapter that does not fit the model.
            FileNotFoundError: an adapter's files are not there.
            TypeError: a value that is not a prompt, or an unknown argument.
            NotImplementedError: an argument that is not built yet.
        """
        check_use_tqdm(use_tqdm)
        self._check_generates()
        tokenized = tokenize(prompt_list(prompts), self._tokenizer, self._session.max_model_len)
        params = self._params_of(sampling_params, len(tokenized))
        return self._session.run(with_adapters(tokenized, lora_request), params, use_tqdm)

    @VLLM_NAMES.arguments_of
    def chat(  # noqa: PLR0917  # vLLM's order
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRALike = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Args:
            messages: dicts with "role" and "content", in order; or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: as in `generate`.
            chat_template: a Jinja template in place of the tokenizer's own. As that is at load, it
                is rendered once for a warning of what it loses.
            add_generation_prompt: opens the assistant's message.
            continue_final_message: continues the last message instead.
            tools: JSON schemas of functions that the template may list.
            chat_template_kwargs: more variables for the template, such as
                `{"enable_thinking": False}`.
            chat_template_content_format: the form in which the template gets each content:
                "string" (parts are joined, one per line), "openai" (parts), or "auto": the form
                that the template reads.

        Raises:
            ValueError: a message without role or content, a tool call whose arguments are not a
                JSON object, a tokenizer without a template, a template that cannot continue the
                last message, or as in `generate`.
            TypeError: a value that is not a conversation.
        """
        check_use_tqdm(use_tqdm)
        rendering = Rendering(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        conversations = conversation_list(messages)
        self._check_generates()
        check_given(chat_template, self._tokenizer)
        length = self._session.max_model_len
        prompts = [chat_prompt(self._tokenizer, each, rendering, length) for each in conversations]
        check_read(self._tokenizer, conversations, rendering)
        params = self._params_of(sampling_params, len(prompts))
        return self._session.run(with_adapters(prompts, lora_request), params, use_tqdm)

    @VLLM_NAMES.arguments_of
    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[CompletionOutput]:
        """Complete one prompt, and return its tokens as they come.

        The request is queued when the first delta is read. Closing the iterator, or leaving the
        loop that reads it, aborts the request. Other calls of this LLM may come between two deltas.

        Args:
            prompt: as one of `generate`.
            sampling_params: None: the checkpoint's recommendation.
            lora_request: an adapter, as in `generate`.

        Returns:
            Deltas: `text`, `token_ids` and `logprobs` hold what is new since the last delta of
            this completion (`index`); the texts joined are the final text. The last delta of each
            completion has its `finish_reason` and `stop_reason`, the others None. A delta has
            tokens without text while the text may still become a stop string or a character.

        Raises:
            ValueError: as `generate`; if the engine refuses the request, at the first delta.
            TypeError: as `generate`.
        """
        self._check_generates()
        (tokenized,) = tokenize(
            [single_prompt(prompt)], self._tokenizer, self._session.max_model_len
        )
        (params,) = self._params_of(sampling_params, 1)
        (tokenized,) = with_adapters([tokenized], lora_request)
        return self._session.stream(tokenized, params)

    @VLLM_NAMES.arguments_of
    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        lora_request: LoRARequest | None = None,
    ) -> Generator[CompletionOutput]:
        """Answer one conversation, and return the answer's tokens as they come.

        Args:
            messages: dicts with "role" and "content", in order.
            sampling_params: None: the checkpoint's recommendation.
            chat_template: as in `chat`, and so are the following.
            add_generation_prompt: opens the assistant's message.
            continue_final_message: continues the last message instead.
            tools: JSON schemas of functions.
            chat_template_kwargs: more variables for the template.
            chat_template_content_format: the form of contents that the template gets.
            lora_request: an adapter, as in `generate`.

        Returns:
            Deltas, as `stream`.

        Raises:
            ValueError: as `chat`; if the engine refuses the request, at the first delta.
            TypeError: as `chat`.
        """
        rendering = Rendering(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        (conversation,) = conversation_list([messages])
        self._check_generates()
        check_given(chat_template, self._tokenizer)
        prompt = chat_prompt(self._tokenizer, conversation, rendering, self._session.max_model_len)
        check_read(self._tokenizer, [conversation], rendering)
        (params,) = self._params_of(sampling_params, 1)
        (prompt,) = with_adapters([prompt], lora_request)
        return self._session.stream(prompt, params)

    @VLLM_NAMES.arguments_of
    def add_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Queue one prompt for `step` and return its id. Raises as `generate` does."""
        self._check_generates()
        (tokenized,) = tokenize(
            [single_prompt(prompt)], self._tokenizer, self._session.max_model_len
        )
        (params,) = self._params_of(sampling_params, 1)
        (request,) = self._session.add(with_adapters([tokenized], lora_request), [params])
        return request.request_id

    @VLLM_NAMES.no_arguments_of
    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of the engine.

        Returns:
            outputs: (request id, completion token ids) of each completion that ended, those that
                ended during a `generate` first. If some failed on the device, a warning gives the
                reason. After an exception the next call returns them, once.
            num_tokens: the step's prefill tokens, or, if it had none, minus the number of tokens
                decoded.

        Raises:
            RuntimeError: the LLM is closed and has unfinished requests, its device is lost, or
                this is a fork of its process.
        """
        return self._session.step()

    @VLLM_NAMES.arguments_of
    def is_finished(self) -> bool:
        """True if no request is in flight and `step` has returned every result."""
        return self._session.finished

    @VLLM_NAMES.arguments_of
    def abort_request(self, request_id: int) -> None:
        """Abort a request; `step` returns nothing of it. An unknown id is a no-op."""
        self._session.abort(request_id)

    @VLLM_NAMES.arguments_of
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The transformers tokenizer, also `llm.tokenizer`.

        Raises:
            ValueError: there is no tokenizer (`skip_tokenizer_init=True`).
        """
        return existing(self._tokenizer).backend

    @VLLM_NAMES.arguments_of
    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what generation_config.json recommends, with our defaults for the rest."""
        return self._default_params.clone()

    @VLLM_NAMES.arguments_of
    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of weights; returns True."""
        self._session.reset_prefix_cache()
        return True

    @VLLM_NAMES.arguments_of
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter's files and begin to read them, before a request needs it.

        Returns:
            True.

        Raises:
            ValueError: the model was loaded without enable_lora=True, the id means another adapter,
                or the files do not fit the model.
            FileNotFoundError: the adapter's files do not exist.
        """
        self._session.add_lora(lora_request)
        return True

    @VLLM_NAMES.arguments_of
    def remove_lora(self, lora_id: int) -> bool:
        """Let an adapter's id mean nothing; requests that run with it go on with it.

        Returns:
            False if it meant nothing.

        Raises:
            ValueError: a value that is not an adapter's id.
        """
        return self._session.remove_lora(lora_id)

    @VLLM_NAMES.arguments_of
    def list_loras(self) -> set[int]:
        """The ids of the adapters that requests or `add_lora` have named."""
        return self._session.lora_ids

    @VLLM_NAMES.arguments_of
    def get_metrics(self) -> dict[str, int]:
        """The engine's counters since it started, and its state now, by name."""
        return self._session.metrics

    @VLLM_NAMES.arguments_of
    def close(self) -> None:
        """Stop the engine and free its memory; a second call is a no-op.

        Unfinished requests are lost.
        """
        self._session.close()

    if not TYPE_CHECKING:  # a type checker must report unknown names itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that names what there is in place of a member of vLLM's."""
            raise missing(self, name, OF_LLM)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_generates(self) -> None:
        self._session.check_usable()
        refuse_pooler(self._pooler)

    def _params_of(self, given: ParamsLike, num_prompts: int) -> list[SamplingParams]:
        """The parameters of each prompt."""
        return params_list(given, self._default_params, num_prompts)

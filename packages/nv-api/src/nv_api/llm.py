"""LLM: prompts in, texts out, on this thread.

Owns the public surface: names, what a user may write, and the checks on it. Never steps the engine
(the session does) and never makes a text (the processor does). Not thread-safe.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from nv_engine import Engine, EngineConfig, SamplingParams
from nv_models import ModelConfig, resolve

from nv_api import options as keywords
from nv_api.arguments import VLLM_NAMES
from nv_api.conversation import Message, Rendering, conversation_list, render
from nv_api.outputs import RequestOutput
from nv_api.pooling import PoolingMethods
from nv_api.progress import UseTqdm, check_use_tqdm
from nv_api.prompts import (
    PromptLike,
    TokenPrompt,
    checked_text,
    prompt_list,
    single_prompt,
    tokenize,
)
from nv_api.session import Session
from nv_api.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ParamsLike = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingMethods):
    """A model that completes prompts, offline: vLLM's `LLM` and nano-vLLM's in one.

    One thread at a time may call it; one that comes while another is at work gets a RuntimeError.

    Args:
        model: a folder (config.json, *.safetensors, tokenizer files), a .gguf file, a hub name
            such as "Qwen/Qwen3-0.6B", or "demo".
        **options: the fields of `nv_engine.EngineConfig` (defaults and meanings are there), and
            `tokenizer`, `tokenizer_mode`, `skip_tokenizer_init`, `trust_remote_code`. vLLM's names
            are understood; those that make no difference here are accepted with one warning.

    Raises:
        FileNotFoundError: a folder or a file of the model is not there.
        ValueError: an option or the checkpoint is out of range.
        TypeError: an unknown option; the message names the nearest known one.
        NotImplementedError: an option or a value that is not built yet.
    """

    def __init__(self, model: str, **options: Any) -> None:  # noqa: ANN401
        asked = keywords.parse(str(model), options)
        path = resolve(model, asked.engine.revision)
        config = ModelConfig.from_path(path)  # first: it refuses what is not supported
        keywords.warn_of_length(options, config.max_length)
        self._default_params = _default_params(path, config)
        text = self._text = None if asked.skip_tokenizer_init else _tokenizer(asked, path, config)
        self.tokenizer: PreTrainedTokenizerBase | None = text.backend if text else None
        self._engine = start_engine(
            replace(
                asked.engine,
                model=str(path),
                tokenizer_eos_token_ids=text.eos_token_ids if text else (),
                tokenizer_num_ids=text.num_ids if text else None,
            )
        )
        self._session = Session(self._engine, self._text)

    @VLLM_NAMES.arguments_of
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: object = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in the order of the prompts.

        Where they do not all fit at once, those with the largest max_tokens are admitted first:
        so the end of a list, when few sequences are left, is short.

        All prompts are checked before any work starts. After an error or Ctrl-C nothing of this
        call is left behind, and requests added before it are as they were.

        Args:
            prompts: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a
                list of those.
            sampling_params: one for all, or one a prompt; None: the checkpoint's recommendation
                (its max_new_tokens included).
            use_tqdm: False for no progress bar.
            lora_request: not built yet.

        Raises:
            ValueError: an empty, too long or otherwise impossible prompt; as many parameters as
                prompts are needed.
            TypeError: something that is no prompt, or an unknown argument.
            NotImplementedError: an argument that is not built yet.
        """
        check_use_tqdm(use_tqdm)
        _refuse_lora(lora_request)
        self._session.check_usable()
        tokenized = tokenize(prompt_list(prompts), self._text)
        params = self._params_of(sampling_params, len(tokenized))
        return self._session.run(tokenized, params, use_tqdm)

    @VLLM_NAMES.arguments_of
    def chat(  # noqa: PLR0917  # vLLM's order
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        lora_request: object = None,
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
            lora_request: not built yet.
            chat_template: a Jinja template in place of the tokenizer's own.
            add_generation_prompt: open the assistant's message.
            continue_final_message: go on with the last message instead.
            tools: JSON schemas of functions that the template may list.
            chat_template_kwargs: more for the template, such as `{"enable_thinking": False}`.
            chat_template_content_format: the form in which the template gets each content:
                "string" (parts are joined, a line each), "openai" (parts), or "auto": the form
                that the template reads.

        Raises:
            ValueError: a message without role or content, a tool call whose arguments are not a
                JSON object, no template for it, a template that cannot be continued, or as in
                `generate`.
            TypeError: something that is no conversation.
        """
        check_use_tqdm(use_tqdm)
        _refuse_lora(lora_request)
        rendering = Rendering(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        prompts = [self._chat_prompt(c, rendering) for c in conversation_list(messages)]
        params = self._params_of(sampling_params, len(prompts))
        return self._session.run(prompts, params, use_tqdm)

    def add_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for `step` and return its id. Raises as `generate` does."""
        self._session.check_usable()
        (tokenized,) = tokenize([single_prompt(prompt)], self._text)
        (params,) = self._params_of(sampling_params, 1)
        return self._session.add(tokenized, params).request_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step of the engine.

        Returns:
            outputs: (request id, completion token ids) of each completion that ended, those that
                ended during a `generate` first; and num_tokens: the step's prefill tokens, or,
                if it had none, minus the number of tokens decoded. Of those that failed on the
                device a warning says why. After an exception the next call returns what this one
            could not, once.

        Raises:
            RuntimeError: the LLM is closed and a request was left unfinished, its device is lost,
                or this is a fork of its process.
        """
        return self._session.step()

    def is_finished(self) -> bool:
        """True if no request is left and `step` has told every result."""
        return self._session.finished

    def abort_request(self, request_id: int) -> None:
        """Drop a request; nothing of it comes out of `step`. An unknown id is a no-op."""
        self._session.abort(request_id)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The transformers tokenizer, also `llm.tokenizer`.

        Raises:
            ValueError: there is none (`skip_tokenizer_init=True`).
        """
        if self.tokenizer is None:
            raise ValueError(
                "there is no tokenizer (skip_tokenizer_init=True): leave the option out"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else the defaults: a copy."""
        return self._default_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of weights; always succeeds: True."""
        self._engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, int]:
        """Counters of the engine since it started, and its state now, by name."""
        return asdict(self._engine.metrics)

    def close(self) -> None:
        """Stop the engine and give its memory back; a second call is a no-op.

        Unfinished requests are lost.
        """
        self._session.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams
    ) -> Generator[str]:
        """One conversation's answer as it comes; closing the iterator aborts it."""
        (conversation,) = conversation_list([messages])
        return self._session.stream(self._chat_prompt(conversation, Rendering()), sampling_params)

    def _params_of(self, given: ParamsLike, num_prompts: int) -> list[SamplingParams]:
        """Parameters of each prompt."""
        if given is None:
            given = self._default_params
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not isinstance(given, Sequence) or not all(
            isinstance(params, SamplingParams) for params in given
        ):
            raise TypeError("sampling_params must be a SamplingParams, or a list of them")
        if len(given) != num_prompts:
            raise ValueError(
                f"there are {num_prompts} prompts and {len(given)} sampling_params: "
                "give one for all, or one a prompt"
            )
        return list(given)

    def _chat_prompt(self, conversation: list[dict[str, Any]], rendering: Rendering) -> TokenPrompt:
        """A conversation as the prompt that the chat template makes of it."""
        self._session.check_usable()
        text = checked_text(render(self.get_tokenizer(), conversation, rendering), "the prompt")
        assert self._text is not None
        (token_ids,) = self._text.encode([text], add_special_tokens=False)
        return TokenPrompt(text, token_ids)


def start_engine(config: EngineConfig) -> Engine:
    """Load the model and make ready to run it."""
    return Engine(config)


def _tokenizer(asked: keywords.Options, path: Path, config: ModelConfig) -> Tokenizer:
    """The model's tokenizer, or the one that `tokenizer=` gives it.

    Raises:
        ValueError: it has ids that the model has no embedding for; and as `load_tokenizer`.
    """
    source = asked.tokenizer or path
    backend = load_tokenizer(source, mode=asked.tokenizer_mode, revision=asked.engine.revision)
    text = Tokenizer(backend)
    if text.num_ids > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source} has {text.num_ids} token ids and the model of {path} has a "
            f"vocabulary of {config.vocab_size}: give the tokenizer that the model was trained "
            "with as tokenizer=…, or pass skip_tokenizer_init=True to work with token ids"
        )
    return text


def _default_params(path: Path, config: ModelConfig) -> SamplingParams:
    """Sampling values that a checkpoint recommends; ours where it says nothing.

    Its max_new_tokens is max_tokens, as in vLLM, where nothing else is asked for.
    """
    recommended = asdict(config.generation)
    recommended["max_tokens"] = recommended.pop("max_new_tokens")
    try:
        return SamplingParams(**{n: v for n, v in recommended.items() if v is not None})
    except ValueError as error:
        raise ValueError(
            f"{path / 'generation_config.json'}: {error}; mend the file or take the value out"
        ) from error


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise NotImplementedError("lora_request is not built yet: leave it out")

"""Arguments: vLLM's arguments that `LLM`, `AsyncLLM` and their methods do not have.

Owns the tables (`nv_engine.names` raises and warns by them), and the checks that several methods
share.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeAlias

from nv_engine import EngineConfig, PoolingParams, SamplingParams
from nv_engine.names import ForeignNames
from nv_engine.sampling_names import ADVICE, INSTEAD, OF_CALLS, RENAMED
from nv_engine.values import shown, whole

SAMPLING = {each.name: "SamplingParams" for each in fields(SamplingParams)}
"""Values of a request that its parameters take."""
OF_PARAMS = {
    **{name: f"pass SamplingParams({ours}=…)" for name, ours in RENAMED.items()},
    **{name: f"in SamplingParams, {text}" for name, text in (ADVICE | INSTEAD).items()},
    "sampling_parameters": "pass sampling_params=SamplingParams(…)",
}
"""Other libraries' names of such values."""
OPTIONS = {
    each.name: "LLM" for each in fields(EngineConfig) if not each.name.startswith("tokenizer_")
}
"""Values of a model that `LLM` takes."""

VLLM_NAMES = ForeignNames(
    no_difference=frozenset({"data_parallel_rank", "trace_headers"}),
    unbuilt={
        "documents": ([],),
        "enable_thinking": (),
        "guided_options_request": (),
        "inputs": (),
        "lora_request": (),
        "mm_processor_kwargs": ({},),
        "priority": (0,),
        "prompt_adapter_request": (),
        "prompt_token_ids": (),
        "structured_outputs": (),
        "tokenization_kwargs": ({},),
        "truncate_prompt_tokens": (),
    },
    elsewhere=OPTIONS | SAMPLING,
    renamed={
        "conversation": "messages",
        "conversations": "messages",
        "prompt": "messages",
        "prompts": "messages",
        "text": "prompts",
        "texts": "prompts",
    },
    advice={
        **OF_PARAMS,
        **OF_CALLS,
        "conversation": "call chat(messages)",
        "messages": "call chat(messages)",
        "use_tqdm": "it shows no bar: leave it out",
    },
    instead={
        "documents": "pass chat_template_kwargs={'documents': …}",
        "enable_thinking": "pass chat_template_kwargs={'enable_thinking': …}",
        "guided_options_request": "pass SamplingParams(structured_outputs=…)",
        "inputs": "pass them as prompts",
        "lora_request": "generate, chat, stream and add_request take it",
        "mm_processor_kwargs": "prompts are text or token ids",
        "priority": "requests start in their order; of one list, those with the largest "
        "max_tokens start first",
        "prompt_adapter_request": "put the adapter's text in front of the prompt",
        "prompt_token_ids": "pass the ids as prompts: a list of ids, or a list of such lists",
        "structured_outputs": "pass SamplingParams(structured_outputs=…)",
        "tokenization_kwargs": "call llm.tokenizer yourself, and pass its ids as prompts",
        "truncate_prompt_tokens": "cut the prompt's token ids yourself, as ids[-k:]",
    },
)
POOLING_NAMES = replace(
    VLLM_NAMES,
    elsewhere=OPTIONS | {each.name: "PoolingParams" for each in fields(PoolingParams)},
)
"""The same for the methods that pool."""

ParamsLike: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


def plain_name(name: str | int) -> str | int:
    """The name that a user gives a request.

    Raises:
        TypeError: neither a str nor an integer.
        ValueError: an empty str.
    """
    if isinstance(name, str) and name:
        return name
    if isinstance(name, str):
        raise ValueError("request_id is empty: give at least one character, or leave it out")
    if (number := whole(name)) is None:
        raise TypeError(f"request_id is {shown(name)}: it must be one id, a str or an integer")
    return number


def params_list(
    given: ParamsLike, default: SamplingParams, num_prompts: int
) -> list[SamplingParams]:
    """The parameters of each prompt.

    Args:
        given: one for all prompts, or one per prompt; None: the default.
        default: what the checkpoint recommends.
        num_prompts: how many there are.

    Raises:
        TypeError: something else.
        ValueError: a list of another length.
    """
    if given is None:
        given = default
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(
        isinstance(params, SamplingParams) for params in given
    ):
        raise TypeError("sampling_params must be a SamplingParams, or a list of them")
    if len(given) != num_prompts:
        raise ValueError(
            f"there are {num_prompts} prompts and {len(given)} sampling_params: "
            "give one for all, or one per prompt"
        )
    return list(given)

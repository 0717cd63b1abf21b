"""Arguments: vLLM's arguments and members that `LLM` and its methods do not have.

Owns the tables (`nv_engine.names` raises and warns by that of arguments), and the checks that
several methods share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias

from nv_engine import EngineConfig, SamplingParams
from nv_engine.names import ForeignNames
from nv_engine.sampling_names import ADVICE, BEAM_SEARCH, INSTEAD, OF_CALLS, RENAMED

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
        "lora_request": "adapters are not there: merge it into the model's weights",
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

WEIGHTS = "the engine owns the model: read its weights from the checkpoint's files"
STEPS = "the LLM itself has add_request, step, is_finished and abort_request"
MEMORY = "close() frees the memory; make the LLM anew when you need it again"
PROFILER = "run the script under a profiler, such as nsys or torch.profiler"

VLLM_MEMBERS: Mapping[str, str] = {
    "apply_model": WEIGHTS,
    "beam_search": BEAM_SEARCH,
    "collective_rpc": WEIGHTS,
    "default_sampling_params": "call get_default_sampling_params()",
    "enqueue": STEPS,
    "get_world_size": "it is the tensor_parallel_size that you passed to LLM",
    "llm_engine": STEPS,
    "model_config": "read the config.json of the model",
    "preprocess_chat": "call chat, or get_tokenizer().apply_chat_template",
    "reset_mm_cache": "prompts are text or token ids",
    "set_tokenizer": "pass tokenizer=… to LLM",
    "sleep": MEMORY,
    "start_profile": PROFILER,
    "stop_profile": PROFILER,
    "wait_for_completion": STEPS,
    "wake_up": MEMORY,
}
"""vLLM's methods and attributes of `LLM` that ours does not have, and what there is instead."""


ParamsLike: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


def refuse_lora(lora_request: object) -> None:
    """Raise NotImplementedError if an adapter is asked for."""
    if lora_request is not None:
        raise NotImplementedError("lora_request is not built yet: leave it out")


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

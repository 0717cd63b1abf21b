"""Options: the keywords of `LLM(...)`, sorted into what the engine and the tokenizer take.

Owns the names: ours, their aliases, and what becomes of vLLM's. Values are checked by whoever they
are for; never starts anything.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from nv_engine import EngineConfig

ALIASES = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
}
"""vLLM's names for options that have one of nano-vLLM's."""

TOKENIZER = ("tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code")

NO_DIFFERENCE = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "cuda_graph_sizes",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "max_context_len_to_capture",
        "max_logprobs",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "num_scheduler_steps",
        "preemption_mode",
        "prefix_caching_hash_algo",
        "scheduler_delay_factor",
        "served_model_name",
        "use_tqdm_on_load",
        "use_v2_block_manager",
    }
)
"""vLLM's options that change nothing here, whatever their value."""

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "calculate_kv_scales": (False,),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "download_dir": (),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "generation_config": ("auto",),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (False,),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto",),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "speculative_config": (),
    "structured_outputs_config": (),
    "task": ("auto", "generate"),
    "tokenizer_revision": (),
}
"""vLLM's options that would change something: the values, besides None, that ask for nothing."""

DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checked options of one `LLM`."""

    engine: EngineConfig
    tokenizer: str | None = None
    """A folder or hub name; None: the model's own."""
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False


def parse(model: str, options: Mapping[str, Any]) -> Options:
    """Sort keywords into the engine's and the tokenizer's.

    None stands for the default, except where None has a meaning of its own (`max_model_len`).

    Raises:
        TypeError: an unknown option (the message names the nearest known one), or one given twice.
        ValueError: a value out of range.
        NotImplementedError: an option or a value that is not built yet.
    """
    known = _canonical(options)
    engine_names = {field.name for field in fields(EngineConfig)} - {"model"}
    ignored = sorted(known.keys() & NO_DIFFERENCE)
    for name in known.keys() - engine_names - NO_DIFFERENCE - set(TOKENIZER):
        _check_unbuilt(name, known[name], engine_names)
        ignored.append(name)
    if ignored:
        warnings.warn(f"accepted without effect: {', '.join(sorted(ignored))}", stacklevel=3)
    if known.get("trust_remote_code"):
        warnings.warn(
            "trust_remote_code=True is accepted, and code from a checkpoint is never run",
            stacklevel=3,
        )
    given = {n: v for n, v in known.items() if v is not None or n == "max_model_len"}
    if "dtype" in given:  # vLLM takes torch's own, and its short names
        name = str(given["dtype"]).removeprefix("torch.")
        given["dtype"] = DTYPES.get(name, name)
    return Options(
        engine=EngineConfig(model=model, **{n: v for n, v in given.items() if n in engine_names}),
        tokenizer=given.get("tokenizer"),
        tokenizer_mode=given.get("tokenizer_mode", "auto"),
        skip_tokenizer_init=bool(given.get("skip_tokenizer_init", False)),
    )


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under our names."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        ours = ALIASES.get(name, name)
        if ours in known:
            twin = next(alias for alias, target in ALIASES.items() if target == ours)
            raise TypeError(f"{ours} and {twin} are one option: give one of them")
        known[ours] = value
    return known


def _check_unbuilt(name: str, value: Any, engine_names: Iterable[str]) -> None:  # noqa: ANN401
    """Refuse an option that is unknown, or that asks for what is not built."""
    if name not in UNBUILT:
        names = [*engine_names, *ALIASES, *TOKENIZER, *NO_DIFFERENCE, *UNBUILT]
        nearest = difflib.get_close_matches(name, names, n=1)
        ours = ", ".join(sorted([*engine_names, *TOKENIZER]))
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {ours}"
        raise TypeError(f"LLM has no option {name!r}: {hint}")
    if value is not None and value not in UNBUILT[name]:
        raise NotImplementedError(f"{name}={value!r} is not built yet: leave {name} out")

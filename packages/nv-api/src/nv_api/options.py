"""Options: the keywords of `LLM(...)`, sorted into what the engine and the tokenizer take.

Owns the names (ours, their aliases and vLLM's) and the kinds of values: a flag, a number, a text.
The engine and the tokenizer check the ranges. Never starts anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from nv_engine import EngineConfig
from nv_engine.names import ForeignNames
from nv_engine.user_line import warn_user
from nv_engine.values import plain, shown, whole

from nv_api.arguments import SAMPLING
from nv_api.option_names import ADVICE, INSTEAD, RENAMED

ALIASES = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
}
"""vLLM's names for options that we name as nano-vLLM does."""

TOKENIZER = {
    "tokenizer": str,
    "tokenizer_mode": str,
    "skip_tokenizer_init": bool,
    "trust_remote_code": bool,
}
"""Options that are not the engine's, and their kinds."""
FROM_TOKENIZER = frozenset({"tokenizer_eos_token_ids", "tokenizer_num_ids"})
"""The engine's options that come from the tokenizer; users cannot give them."""
PLACES = ("tokenizer", "revision")
"""Options that name a place: a text or a path."""

NO_DIFFERENCE = frozenset(
    {
        "aggregate_engine_logging",
        "all2all_backend",
        "allowed_media_domains",
        "async_scheduling",
        "code_revision",
        "collect_detailed_traces",
        "compilation_config",
        "cuda_graph_sizes",
        "cudagraph_capture_sizes",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "disable_hybrid_kv_cache_manager",
        "disable_log_requests",
        "disable_log_stats",
        "disable_mm_preprocessor_cache",
        "enable_chunked_prefill",
        "enable_dbo",
        "enable_eplb",
        "enable_log_requests",
        "enable_multimodal_encoder_data_parallel",
        "eplb_config",
        "expert_placement_strategy",
        "fail_on_environ_validation",
        "fully_sharded_loras",
        "interleave_mm_strings",
        "kernel_config",
        "kv_sharing_fast_prefill",
        "language_model_only",
        "long_prefill_token_threshold",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "max_context_len_to_capture",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "media_io_kwargs",
        "mm_encoder_tp_mode",
        "mm_processor_cache_gb",
        "moe_backend",
        "multi_step_stream_outputs",
        "num_lookahead_slots",
        "num_scheduler_steps",
        "optimization_level",
        "preemption_mode",
        "prefix_caching_hash_algo",
        "profiler_config",
        "pt_load_map_location",
        "ray_workers_use_nsight",
        "safetensors_load_strategy",
        "scheduler_delay_factor",
        "served_model_name",
        "show_hidden_metrics_for_version",
        "shutdown_timeout",
        "skip_mm_profiling",
        "stream_interval",
        "ubatch_size",
        "use_tqdm_on_load",
        "use_v2_block_manager",
    }
)
"""vLLM's options that change nothing here, whatever their value."""
FOR_RANKS = frozenset({"disable_custom_all_reduce"})
"""The engine's options that change nothing without `tensor_parallel_size`."""

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "additional_config": ({},),
    "allowed_local_media_path": ("",),
    "attention_config": ({},),
    "calculate_kv_scales": (False,),
    "config_format": ("auto",),
    "cpu_offload_gb": (0,),
    "data_parallel_rank": (0,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "default_mm_loras": ({},),
    "disable_sliding_window": (False,),
    "download_dir": (),
    "ec_transfer_config": (),
    "enable_expert_parallel": (False,),
    "enable_lora_bias": (False,),
    "enable_mm_embeds": (False,),
    "enable_prompt_adapter": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "generation_config": ("auto",),
    "hf_config_path": (),
    "hf_token": (False,),
    "ignore_patterns": ("original/**", "original/**/*"),
    "kv_cache_memory_bytes": (),
    "kv_events_config": (),
    "kv_offloading_backend": (),
    "kv_offloading_size": (),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "logits_processor_pattern": (),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "long_lora_scaling_factors": (),
    "lora_extra_vocab_size": (0, 256),
    "lora_target_modules": (),
    "master_addr": ("127.0.0.1",),
    "master_port": (),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto",),
    "model_loader_extra_config": ({},),
    "nnodes": (1,),
    "node_rank": (0,),
    "otlp_traces_endpoint": (),
    "override_attention_dtype": (),
    "override_generation_config": ({},),
    "override_pooler_config": (),
    "pipeline_parallel_size": (1,),
    "pooler_config": (),
    "prefill_context_parallel_size": (1,),
    "quantization_param_path": (),
    "scheduler_cls": (),
    "scheduling_policy": ("fcfs",),
    "speculative_config": (),
    "structured_outputs_config": (),
    "tokenizer_revision": (),
    "video_pruning_rate": (0,),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
}
"""vLLM's options that are not built: the values, besides None, that change nothing."""
VLLM_NAMES = ForeignNames(
    no_difference=NO_DIFFERENCE,
    unbuilt=UNBUILT,
    elsewhere={name: owner for name, owner in SAMPLING.items() if name != "seed"},
    renamed=RENAMED,
    instead=INSTEAD,
    advice=ADVICE,
)

DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checked options of one `LLM`."""

    engine: EngineConfig
    tokenizer: str | Path | None = None
    """A folder or hub name; None: the model's own."""
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False


def parse(model: str | Path, options: Mapping[str, Any]) -> Options:
    """Sort keywords into the engine's and the tokenizer's.

    None stands for the default, except where None has a meaning of its own (`max_model_len`).

    Raises:
        TypeError: an unknown option (the message names the nearest known one), or one given twice.
        ValueError: a value out of range.
        NotImplementedError: an option or a value that is not built yet.
    """
    known = _canonical(options)
    _warn_of_promises(known)
    _check_place("model", model)
    kinds = {field.name: field.type for field in fields(EngineConfig)} | TOKENIZER
    kinds = {name: kind for name, kind in kinds.items() if name not in {"model", *FROM_TOKENIZER}}
    alone = (known.get("tensor_parallel_size") or 1) == 1
    ignored = VLLM_NAMES.ignored("LLM", known, [*kinds, *ALIASES])
    if alone:
        ignored += known.keys() & FOR_RANKS
    if ignored:
        warn_user(f"accepted without effect: {', '.join(sorted(ignored))}")
    given = _spelled(known)
    for name in given.keys() & kinds.keys():
        _check_kind(name, given[name], kinds[name])
    return Options(
        tokenizer=given.get("tokenizer"),
        tokenizer_mode=given.get("tokenizer_mode", "auto"),
        skip_tokenizer_init=given.get("skip_tokenizer_init", False),
        engine=EngineConfig(
            model=str(model),
            **{n: given[n] for n in given.keys() & kinds.keys() - TOKENIZER.keys()},
        ),
    )


def warn_of_length(options: Mapping[str, Any], own: int, place: str) -> None:
    """Warn that the user's max_model_len is cut to the model's own length."""
    asked = whole(options.get("max_model_len"))
    if asked is not None and asked > own:
        warn_user(
            f"max_model_len is {asked} and the model's own length is {own} ({place}): {own} is used"
        )


def _warn_of_promises(known: Mapping[str, Any]) -> None:
    """Warn that trust_remote_code=True has no effect."""
    if known.get("trust_remote_code"):
        warn_user("trust_remote_code=True is accepted, and code from a checkpoint is never run")


def _spelled(known: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not defaults; torch's objects become their names."""
    given = {n: v for n, v in known.items() if v is not None or n == "max_model_len"}
    for option in given.keys() & {"dtype", "lora_dtype"}:  # vLLM takes its short names too
        name = _text(given[option]).removeprefix("torch.")
        given[option] = DTYPES.get(name, name)
    if "device" in given:
        given["device"] = _text(given["device"])
    return given


def _text(value: object) -> str:
    """A name, or the name of one of torch's objects; any other value as an error shows it."""
    try:
        return str(value)
    except Exception:  # of an integer with more than 4300 digits, or of a user's class
        return shown(value)


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under our names."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        ours = ALIASES.get(name, name)
        if ours in known:
            twin = next(alias for alias, target in ALIASES.items() if target == ours)
            raise TypeError(f"{ours} and {twin} are one option: give one of them")
        known[ours] = plain(value)
    return known


def _check_kind(name: str, value: object, kind: object) -> None:
    """Check that a flag, a number or a name is one; other kinds are checked with their range."""
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}: it must be True or False")
    if kind is float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{name} is {shown(value)}: it must be a number")
    if name in PLACES:
        _check_place(name, value)


def _check_place(name: str, value: object) -> None:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{name} is {shown(value)}: it must be a name that is not empty")

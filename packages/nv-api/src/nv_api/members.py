"""Members: vLLM's methods and attributes that `LLM` and `AsyncLLM` do not have.

Owns the tables of what there is in place of each. A type checker does not see them: it must report
unknown names itself.
"""

from collections.abc import Mapping

from nv_engine.sampling_names import BEAM_SEARCH

WEIGHTS = "the engine owns the model: read its weights from the checkpoint's files"
STEPS = "the LLM itself has add_request, step, is_finished and abort_request"
MEMORY = "close() frees the memory; make the LLM anew when you need it again"
PROFILER = "run the script under a profiler, such as nsys or torch.profiler"
CONFIG = "read the config.json of the model"
NO_MEDIA = "prompts are text or token ids"
PINNED = "make max_loras as large as the number of adapters, and each stays in a slot"
OPTIONS = "pass the options themselves: {}(model, max_model_len=…)"
SUBMIT = "call generate, or submit, which returns a stream of what is new"
ASYNC_MEMORY = "await close() frees the memory; make the AsyncLLM anew when you need it again"
PAUSE = "stop calling it: what is in flight runs to its end; abort(request_id) ends one"

OF_LLM: Mapping[str, str] = {
    "apply_model": WEIGHTS,
    "beam_search": BEAM_SEARCH,
    "collective_rpc": WEIGHTS,
    "default_sampling_params": "call get_default_sampling_params()",
    "enqueue": STEPS,
    "from_engine_args": OPTIONS.format("LLM"),
    "get_world_size": "it is the tensor_parallel_size that you passed to LLM",
    "llm_engine": STEPS,
    "model_config": CONFIG,
    "pin_lora": PINNED,
    "preprocess_chat": "call chat, or get_tokenizer().apply_chat_template",
    "reset_mm_cache": NO_MEDIA,
    "set_tokenizer": "pass tokenizer=… to LLM",
    "sleep": MEMORY,
    "start_profile": PROFILER,
    "stop_profile": PROFILER,
    "wait_for_completion": STEPS,
    "wake_up": MEMORY,
}
"""In place of members of vLLM's `LLM`."""

OF_ASYNC_LLM: Mapping[str, str] = {
    **dict.fromkeys(("add_request", "beam_search", "engine_core", "output_processor"), SUBMIT),
    **dict.fromkeys(("is_sleeping", "sleep", "wake_up"), ASYNC_MEMORY),
    **dict.fromkeys(("is_paused", "pause_generation", "resume_generation"), PAUSE),
    **dict.fromkeys(("from_engine_args", "from_vllm_config"), OPTIONS.format("AsyncLLM")),
    **dict.fromkeys(("get_model_config", "get_vllm_config", "model_config", "vllm_config"), CONFIG),
    **dict.fromkeys(("start_profile", "stop_profile"), PROFILER),
    "collective_rpc": WEIGHTS,
    "do_log_stats": "read stats, the newest counters",
    "embed": "call encode(prompt, pooling_task='embed')",
    "get_supported_tasks": "read pooler: None, or how prompts are pooled",
    "pin_lora": PINNED,
    "is_tracing_enabled": "tracing is an option of nv serve",
    "reset_mm_cache": NO_MEDIA,
    "shutdown": "await close()",
    "start_engine_loop": "await ready()",
    "step": SUBMIT,
    "stream": "iterate generate, or the stream that submit returns",
    "wait_for_requests_to_drain": "await the requests themselves; num_unfinished counts them",
}
"""In place of members of vLLM's `AsyncLLM`, and of `LLM`."""


def missing(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """The error of a member that an object does not have, with what there is in its place."""
    kind = type(owner).__name__
    if name in instead:
        return AttributeError(f"{kind}.{name} is not built yet: {instead[name]}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")

"""Option names: what other libraries' options of a model are called here.

Owns the hints for `LLM(...)`; `options` has the names of ours and of vLLM's.
"""

from nv_engine.sampling_names import OF_CALLS

from nv_api.arguments import OF_PARAMS

ADAPTERS = "pass lora_request=… to each call, or --lora-modules NAME=PATH to nv serve"
PARAMS = "pass SamplingParams(…) to each call"
CONFIG = "pass hf_overrides={'rope_parameters': {…}}"
SERVER = "it is an option of nv serve"
SPECULATIVE = "speculative decoding is not there: leave it out"
NOT_NEEDED = "it would change nothing here: leave it out"
CHECKPOINT = "the checkpoint decides: give a quantized one, such as a .gguf file"
COPIES = "make an LLM for each card, or use nv_api.ray.NvPredictor"
HUB_FOLDER = "set the environment variable HF_HOME to the folder for downloads"

NO_CHANGE = (
    "guided_decoding_backend",
    "guided_decoding_disable_fallback",
    "low_cpu_mem_usage",
    "verbose",
)
RENAMED = {
    "attn_implementation": "attention_backend",
    "batch_size": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "device_map": "device",
    "disable_cuda_graph": "enforce_eager",
    "eager": "enforce_eager",
    "gpu_memory": "gpu_memory_utilization",
    "gpu_memory_fraction": "gpu_memory_utilization",
    "kv_cache_free_gpu_mem_fraction": "gpu_memory_utilization",
    "max_batch_size": "max_num_seqs",
    "max_context_len": "max_model_len",
    "max_context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_seq_length": "max_model_len",
    "max_total_tokens": "max_model_len",
    "mem_fraction": "gpu_memory_utilization",
    "mem_fraction_static": "gpu_memory_utilization",
    "n_ctx": "max_model_len",
    "num_gpus": "tensor_parallel_size",
    "quantize": "quantization",
    "tokenizer_path": "tokenizer",
    "torch_dtype": "dtype",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}
"""Names of SGLang, transformers, llama.cpp and others, and ours."""
ADVICE = {
    **OF_PARAMS,
    **OF_CALLS,
    **dict.fromkeys(("api_key", "base_url", "host", "port"), SERVER),
    **dict.fromkeys(("enable_reasoning", "reasoning_parser", "tool_call_parser"), SERVER),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), CHECKPOINT),
    **dict.fromkeys(NO_CHANGE, NOT_NEEDED),
    **dict.fromkeys(("num_speculative_tokens", "speculative_model"), SPECULATIVE),
    **dict.fromkeys(("rope_scaling", "rope_theta"), CONFIG),
    **dict.fromkeys(("token", "use_auth_token"), "set the environment variable HF_TOKEN"),
    "cache_dir": HUB_FOLDER,
    "disable_radix_cache": "pass enable_prefix_caching=False",
    "dp_size": COPIES,
    **dict.fromkeys(("lora", "lora_modules", "lora_paths"), ADAPTERS),
    "local_files_only": "set the environment variable HF_HUB_OFFLINE=1",
    "max_length": "pass max_model_len here, or SamplingParams(max_tokens=…) to each call",
    "model_path": "pass it as the first argument, model",
    "n_gpu_layers": "pass device='cuda' or device='cpu' for all layers",
    "pp_size": "pass tensor_parallel_size",
    "subfolder": "pass the folder itself as model",
    "use_flash_attn": "pass attention_backend='flash_attn'",
    "worker_use_ray": "pass distributed_executor_backend='ray'",
}
"""Advice on names that mean something else than an option."""
NODES = "pass distributed_executor_backend='ray', which finds the nodes"
POOLER = (
    "the checkpoint's files decide how it pools (1_Pooling/config.json); pass PoolingParams(…) to "
    "each call"
)
INSTEAD = {
    **dict.fromkeys(("master_addr", "master_port", "nnodes", "node_rank"), NODES),
    **dict.fromkeys(("override_pooler_config", "pooler_config"), POOLER),
    "attention_config": "pass attention_backend",
    "ignore_patterns": "the files that a model needs are fetched: leave it out",
    "kv_cache_memory_bytes": "pass num_kvcache_blocks, or gpu_memory_utilization",
    "otlp_traces_endpoint": "it is --otlp-endpoint of nv serve",
    "quantization_param_path": "the scales of a checkpoint's own files are read: leave it out",
    "default_mm_loras": "pass lora_request=… to each call; prompts are text or token ids",
    "enable_lora_bias": "train the adapter without a bias, or merge it into the base model",
    "enable_prompt_adapter": "put the adapter's text in front of the prompt",
    "long_lora_scaling_factors": "merge such an adapter into the base model",
    "lora_extra_vocab_size": "an adapter may not add tokens: merge it into the base model",
    "lora_target_modules": "the tensors of an adapter's file decide; all that fit are used",
    "calculate_kv_scales": "leave it out: kv_cache_dtype='fp8' needs no scales",
    "cpu_offload_gb": "weights stay on the device: use tensor_parallel_size, or a smaller model",
    **dict.fromkeys(("data_parallel_rank", "data_parallel_size"), COPIES),
    "download_dir": HUB_FOLDER,
    "generation_config": PARAMS,
    "hf_token": "set the environment variable HF_TOKEN",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs of "
    "SamplingParams",
    "logprobs_mode": "log-probabilities are those of the raw logits: leave it out",
    "override_generation_config": PARAMS,
    "pipeline_parallel_size": "pass tensor_parallel_size",
    "scheduling_policy": "requests start in their order: leave it out",
    "structured_outputs_config": "llguidance compiles every grammar: leave it out",
    "tokenizer_revision": "pass the tokenizer's folder as tokenizer=…",
}
"""Advice on options of vLLM that are not built."""

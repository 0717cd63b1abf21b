"""A tiny random checkpoint of each architecture, with all its features in use."""

from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPT = [(37 * i + 11) % 320 for i in range(60)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 0.7 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
GEMMA = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24}
CASES = {
    "Qwen2": {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
    },
    "Qwen3": {"head_dim": 32, "attention_bias": True},
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 16, "head_dim": 32},
    "Ministral": {
        "sliding_window": 16, "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "head_dim": 32,
    },
    "Phi3": {
        "sliding_window": 48, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32,
    },
    "SmolLM3": {
        "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 16,
        "attention_bias": True,
    },
    "Granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0,
        "attention_multiplier": 0.4,
    },
    "Olmo2": {"attention_bias": True},
    "Olmo3": {
        "sliding_window": 16, "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "Gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {
        **GEMMA, "sliding_window_pattern": 2, "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "Glm4": {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
    "OPT": {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Exaone4": {"sliding_window": 16, "sliding_window_pattern": 2, "head_dim": 32},
    "Qwen3Moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "GptOss": {
        "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip
"""Fields beside SIZES, by the beginning of the architecture's name."""
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
CARD_DIM = 64
"""The least head_dim of the kernels of attention on a card."""


def card_sizes(name: str) -> dict[str, object]:
    """Fields with which the heads of an architecture are long enough for a card's kernels."""
    sizes: dict[str, object] = {"hidden_size": CARD_DIM * SIZES["num_attention_heads"]}
    if "head_dim" in CASES[name]:
        sizes["head_dim"] = CARD_DIM
    if name == "Gemma2":
        sizes["final_logit_softcapping"] = 20.0  # with 3 nearly all logits are 3 in bf16
    if name == "OPT":
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
    if name == "Phi3":
        count = int(CARD_DIM * LONGROPE["partial_rotary_factor"]) // 2
        factors = {"short_factor": 0.05, "long_factor": 0.7}
        lists = {key: [1.0 + step * i for i in range(count)] for key, step in factors.items()}
        sizes["rope_parameters"] = {**LONGROPE, **lists}
    return sizes


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Wide weights: logits spread over several units, so that rounding rarely moves the argmax."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("gate_up_proj_bias"):
            parameter.copy_(4 * noise)  # past the limit of the gate
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.3 * noise)
        elif parameter.ndim == 1 or name.endswith("_bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def write_tiny_model(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """Write the random checkpoint of an architecture."""
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_class(**{**SIZES, **CASES[name], **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomize(model, 0)
    model.to(dtype).save_pretrained(folder)
    return folder


def transformers_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of transformers; in one pass, so that longrope sees the whole length."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]

"""Random adapters in the format of peft, and the base model with one of them merged into it."""

import json
import math
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
EMBEDDING = "model.embed_tokens"


def write_adapter(
    folder: Path, base: Path, modules=LAYER, *, r=8, layers=None, seed=0, dtype=torch.float32,
    scale=0.4, ranks=None, **config,
) -> Path:  # fmt: skip
    """Write an adapter of some modules of `base`.

    Args:
        folder: to write.
        base: a checkpoint of transformers, untied.
        modules: in every layer, or, with a name that begins with "model." or "lm_head", once.
        r: of all modules that `ranks` does not name.
        layers: that have it; None: all.
        seed: of the values.
        dtype: of the file.
        scale: of the values of B.
        ranks: r by module.
        **config: more of adapter_config.json.
    """
    weights = load_file(base / "model.safetensors")
    count = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    names = []
    for module in modules:
        if module.startswith(("model.", "lm_head")):
            names.append(module)
        else:
            names += [f"model.layers.{i}.{module}" for i in layers or range(count)]
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name in names:
        rows, columns = weights[f"{name}.weight"].shape
        rank = (ranks or {}).get(name, r)
        a = torch.randn(rank, columns, generator=generator) * columns**-0.5
        b = torch.randn(rows, rank, generator=generator) * scale / rank**0.5
        place = f"base_model.model.{name}"
        if name == EMBEDDING:
            a, b = a.new_empty(rank, rows), b.new_empty(columns, rank)
            a.normal_(generator=generator), b.normal_(std=0.2, generator=generator)
            tensors |= {f"{place}.lora_embedding_A": a, f"{place}.lora_embedding_B": b}
        else:
            tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
    folder.mkdir(parents=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "rank_pattern": ranks or {}}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return folder


def scale_of(config: dict, name: str) -> float:
    """The factor of a module, for patterns that are whole names."""
    rank = config["rank_pattern"].get(name, config["r"])
    alpha = config.get("alpha_pattern", {}).get(name, config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def merged_model(base: Path, adapter: Path | None) -> torch.nn.Module:
    """The model of transformers, in fp32, with W + s B A in place of W."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is None:
        return model
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, a in tensors.items():
            for kind, ending in (("", ".lora_A.weight"), ("E", ".lora_embedding_A")):
                if not name.endswith(ending):
                    continue
                b = tensors[name.replace("_A", "_B")]
                module = name.removeprefix("base_model.model.").removesuffix(ending)
                delta = (b.double() @ a.double()) * scale_of(config, module)
                weight = modules[module].weight
                weight.copy_(weight.double() + (delta.T if kind else delta))
    return model


@torch.inference_mode()
def merged_logits(base: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of the merged model."""
    return merged_model(base, adapter)(torch.tensor([token_ids])).logits[0]

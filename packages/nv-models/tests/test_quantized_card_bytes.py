"""The planned bytes of a quantized model on a card are those that its layout takes there."""

import gc
import json
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from nv_kernels.linear.experts.triton_quantized import (
    TritonQuantizedExperts,
)
from nv_kernels.linear.experts.triton_quantized import (
    quantized_experts as triton_quantized_experts,
)
from nv_kernels.linear.triton.quantized_layout import lay_out_grouped
from nv_models import plan_model
from nv_models.layers.experts import ExpertMLPs
from nv_models.layers.linear import Linear

PACKERS = {
    "awq": {"scheme": "awq"},
    "gptq": {"scheme": "gptq"},
    "gptq, 8 bits": {"scheme": "gptq", "bits": 8},
    "gptq, symmetric": {"scheme": "gptq", "sym": True},
}


@pytest.mark.parametrize("name", PACKERS)
def test_zero_points_are_words_on_a_card(float_checkpoint, packed, tmp_path, name):
    packer = packed.Packer(**PACKERS[name])
    packed.write_packed(tmp_path / "model", float_checkpoint, {"_proj": packer}, packer.config())
    on_card = plan_model(tmp_path / "model", device="cuda", dtype="float16").num_bytes
    plan = plan_model(tmp_path / "model", device="cpu", dtype="float16")
    arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record)
    model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
    records = [module.weight for module in model.modules() if isinstance(module, Linear)]
    assert all(isinstance(record, nk.Grouped) for record in records)
    laid_out = [lay_out_grouped(record) for record in records]
    more = beside_codes(laid_out) - beside_codes(records)
    assert on_card - plan.num_bytes == more
    assert (more > 0) == ("symmetric" not in name)


def beside_codes(records):
    """Bytes of scales and offsets."""
    return sum(each.scale.nbytes + (each.offset.nbytes if each.offset is not None else 0)
               for each in records)  # fmt: skip


CONFIGS = {
    "fp8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "4 bits": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    ),
    "4 bits, zero points": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
}  # fmt: skip
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_card_holds_what_was_planned(tmp_path, name):
    file_format, weights = CONFIGS[name]
    group = {"targets": ["Linear"], "format": file_format, "weights": weights}
    if name in {"fp8 rows", "int8"}:
        inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token"}
        group["input_activations"] = {"symmetric": True, "dynamic": True, **inputs}
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = {"architectures": ["Qwen3ForCausalLM"], **SIZES}
    config["quantization_config"] = scheme | {"ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_model(tmp_path, device="cuda", load_format="dummy")
    before = requested_bytes()
    model = plan.load()
    held = requested_bytes() - before
    assert 0.99 * plan.num_bytes < held < 1.01 * plan.num_bytes
    del model


def requested_bytes():
    """Bytes of all tensors on the card.

    `memory_allocated` counts whole blocks of the allocator, which after other tests are larger than
    the tensors in them, and what other tests left in cycles.
    """
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [],
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("name", ["4 bits", "4 bits, zero points", "int8", "fp8 blocks"])
def test_experts_on_a_card_take_what_was_planned(tiny_checkpoint, name):
    """The layout is made on a CPU, by the function that a card's weights are made by."""
    scheme = BLOCKS if name == "fp8 blocks" else compressed_tensors(name)
    folder = tiny_checkpoint("qwen3_moe", **MOE)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    plan = plan_model(folder, load_format="dummy", dtype="bfloat16")
    planned = sum(loaded.card_bytes for loaded in loaded_experts(plan))
    made = {"quantized": lambda record: record, "quantized_experts": triton_quantized_experts}
    arithmetic = replace(plan.placement.arithmetic, **made)
    model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
    modules = [module for module in model.modules() if isinstance(module, ExpertMLPs)]
    assert all(isinstance(module.experts, TritonQuantizedExperts) for module in modules)
    assert sum(module.experts.num_bytes for module in modules) == planned


def loaded_experts(plan):
    """The experts of a plan's layers, with tensors on meta."""
    modules = plan._outline().modules()
    return [module.loaded for module in modules if isinstance(module, ExpertMLPs)]


def compressed_tensors(name):
    """A quantization_config of a form, with routers in floats."""
    file_format, weights = CONFIGS[name]
    group = {"targets": ["Linear"], "format": file_format, "weights": weights}
    if name == "int8":
        inputs = {"num_bits": 8, "type": "int", "strategy": "token"}
        group["input_activations"] = {"symmetric": True, "dynamic": True, **inputs}
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return scheme | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}

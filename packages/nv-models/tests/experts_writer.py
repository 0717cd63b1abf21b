"""A writer of checkpoints of Qwen3's mixture of experts whose matrices are random codes."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file

MOE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
"""Each rank of two has whole blocks of 128 rows and columns."""


class Fp8Blocks:
    """Qwen3's and DeepSeek's fp8."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def matrix(self, rows, columns):
        codes = torch.randn(rows, columns, generator=self.generator) * 30
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        size = -(-rows // 128), -(-columns // 128)
        scale = torch.rand(size, generator=self.generator) * 0.004 + 0.001
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide

    def config(self):
        skipped = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
        return {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": skipped,
        }


class Packed4:
    """compressed-tensors' W4A16 in groups of 32."""

    def __init__(self, along):
        self.generator = torch.Generator().manual_seed(0)
        self.along = along

    def matrix(self, rows, columns):
        q = torch.randint(0, 16, (rows, columns), generator=self.generator)
        scale = torch.rand(rows, columns // 32, generator=self.generator) * 0.02 + 0.005
        scale = scale.bfloat16()
        tensors = {
            "weight_packed": self.along(q, 1, list(range(0, 32, 4))),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return tensors, (q - 8).float() * scale.float().repeat_interleave(32, 1)

    def config(self):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        return compressed("pack-quantized", weights)


class Fp8Rows:
    """compressed-tensors' fp8 with a scale per row; tokens dynamic, or static."""

    def __init__(self, is_static=False):
        self.generator = torch.Generator().manual_seed(0)
        self.is_static = is_static

    def matrix(self, rows, columns):
        codes = torch.randn(rows, columns, generator=self.generator) * 30
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(rows, 1, generator=self.generator) * 0.004 + 0.001
        tensors = {"weight": codes, "weight_scale": scale}
        if self.is_static:
            tensors["input_scale"] = torch.rand(1, generator=self.generator) * 0.01 + 0.02
        return tensors, codes.float() * scale

    def config(self):
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        if self.is_static:
            inputs |= {"strategy": "tensor", "dynamic": False}
        return compressed("float-quantized", weights, inputs)


class Int8Rows:
    """compressed-tensors' W8A8."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def matrix(self, rows, columns):
        codes = torch.randint(-128, 128, (rows, columns), generator=self.generator)
        scale = torch.rand(rows, 1, generator=self.generator) * 0.001 + 0.0005
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes.float() * scale

    def config(self):
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        return compressed("int-quantized", weights, inputs)


def compressed(file_format, weights, inputs=None):
    """A quantization_config of compressed-tensors that leaves routers and head in floats."""
    group = {"targets": ["Linear"], "format": file_format, "weights": weights}
    if inputs is not None:
        group["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


def packers(packed: ModuleType) -> dict[str, tuple]:
    """Each format's maker of matrices, and fields that keep the routers in floats."""
    return {
        "fp8": (Fp8Blocks(), {}),
        "fp8 rows": (Fp8Rows(), {}),
        "fp8 static": (Fp8Rows(is_static=True), {}),
        "int8": (Int8Rows(), {}),
        "W4A16": (Packed4(packed.along), {}),
        "AWQ": (packed.Packer("awq"), {"modules_to_not_convert": ["mlp.gate"]}),
        "GPTQ": (packed.Packer("gptq"), {"dynamic": {r"-:.*mlp\.gate$": {}}}),
        "GPTQ 8": (packed.Packer("gptq", 8), {"dynamic": {r"-:.*mlp\.gate$": {}}}),
        "ordered": (packed.Packer("gptq", desc_act=True), {"dynamic": {r"-:.*mlp\.gate$": {}}}),
    }


def write_experts(
    name: str, folder: Path, write_floats: Callable[..., Path], packed: ModuleType, ends="_proj",
    **options: object,
) -> tuple[Path, Path]:  # fmt: skip
    """Write a checkpoint of a format, and its values in floats; returns their folders.

    Args:
        name: of one of `packers`.
        folder: to be written.
        write_floats: `conftest.write_tiny_checkpoint` without its folder.
        packed: the module that writes AWQ and GPTQ.
        ends: of the names of modules that are codes.
        options: fields of the config besides MOE.
    """
    source = write_floats("qwen3_moe", f"{name} in floats", **{**MOE, **options})
    packer, fields = packers(packed)[name]
    config = packer.config() | fields
    values = packed.write_packed(folder, source, {ends: packer}, config)
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"{module}.weight": each.contiguous() for module, each in values.items()}
    save_file(tensors, source / "model.safetensors")
    return folder, source

"""Write the tiny checkpoints of this folder with llm-compressor, and what its own tools read there.

    uv pip install llmcompressor==0.14.1a20261020 compressed-tensors==0.20.1 transformers==5.17.0
    python make_compressed_tensors.py FOLDER

Each folder gets expected.safetensors: logits [T, V] in fp32 of transformers with
compressed-tensors on a CPU, the ids that follow greedily, and expected.json: the SHA-256 of each
matrix in bf16 as compressed-tensors dequantizes it, and the versions.
"""

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers.utils.quantization_config import CompressedTensorsConfig

PROMPT = [(37 * i + 11) % 64 for i in range(24)]
NUM_NEW = 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_BLOCKS = {"fp8_block": {"intermediate_size": 256, "num_key_value_heads": 4}}
"""Rows of k, v and gate are whole blocks of 128."""


def weights(bits: int, kind: str = "int", **options: object) -> dict:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **options}


def group(**fields: object) -> dict:
    return {"targets": ["Linear"], **fields}


TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
RECIPES = {
    "w4": [group(weights=weights(4, strategy="group", group_size=32))],
    "w4_asym": [group(weights=weights(4, strategy="group", group_size=64, symmetric=False))],
    "w8": [group(weights=weights(8, strategy="channel"))],
    "w8_asym": [group(weights=weights(8, strategy="group", group_size=32, symmetric=False))],
    "int8": "INT8",
    "fp8_row": "FP8_DYNAMIC",
    "fp8_tensor": [group(weights=weights(8, "float", strategy="tensor"), input_activations=STATIC)],
    "fp8_block": "FP8_BLOCK",
    "mixed": [
        group(
            targets=["re:.*mlp.*"],
            weights=weights(4, strategy="channel"),
        ),
        group(
            targets=["re:.*(q|k|v)_proj"],
            weights=weights(8, "float", strategy="channel"),
            input_activations=TOKENS,
        ),
    ],
}
"""By the folder's name: a preset, or config_groups. In `mixed`, o_proj stays in floats."""


def make(folder: Path, recipe: object) -> None:
    """Quantize a random model and note what transformers computes with it."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, **OF_BLOCKS.get(folder.name, {})})
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    named = (
        {"scheme": recipe, "targets": "Linear"}
        if isinstance(recipe, str)
        else {"config_groups": {f"group_{i}": each for i, each in enumerate(recipe)}}
    )
    data = {}
    if folder.name == "fp8_tensor":
        rows = {"input_ids": [PROMPT], "attention_mask": [[1] * len(PROMPT)]}
        data = {"dataset": Dataset.from_dict(rows), "num_calibration_samples": 1}
    oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **named), **data)
    model.save_pretrained(folder, save_compressed=True)
    note(folder)


@torch.inference_mode()
def note(folder: Path) -> None:
    """Write the expected logits, ids and matrices."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = list(PROMPT)
    logits = model(torch.tensor([ids])).logits[0]
    for _ in range(NUM_NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    new = torch.tensor(ids[len(PROMPT) :])
    save_file({"logits": logits.clone(), "greedy": new}, folder / "expected.safetensors")
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    dense = {
        name: hashlib.sha256(module.weight.view(torch.int16).numpy().tobytes()).hexdigest()
        for name, module in whole.named_modules()
        if name.endswith("_proj")
    }
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    text = json.dumps({"dense": dense, "versions": versions}, indent=2)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name, recipe in RECIPES.items():
        make(Path(sys.argv[1]) / name, recipe)

"""Quantized checkpoints: a file for each scheme, and the table of them.

Owns the choice of the scheme. Never reads a file.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nv_models.fields import table
from nv_models.quantization.awq import AWQScheme
from nv_models.quantization.compressed_tensors import CompressedTensorsScheme
from nv_models.quantization.form import Files
from nv_models.quantization.fp8 import Fp8Scheme
from nv_models.quantization.gptq import GPTQScheme
from nv_models.quantization.scheme import Scheme

SCHEMES: dict[str, Callable[[Mapping[str, Any], Files], Scheme]] = {
    "awq": AWQScheme,
    "compressed-tensors": CompressedTensorsScheme,
    "fp8": Fp8Scheme,
    "gptq": GPTQScheme,
}
"""By `quant_method`."""
OTHER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that have the `quantization_config` where config.json has none, and its `quant_method`."""


def quantization_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of config.json that describe how weights are quantized; empty: they are not."""
    return table(raw, "quantization_config") or table(raw, "compression_config")


def quantization_method(raw: Mapping[str, Any], dequantized: str | None) -> str | None:
    """The name of a checkpoint's scheme; None: its weights are floats when they are loaded.

    Args:
        raw: the fields of config.json.
        dequantized: the one method whose files are dequantized while they are read.

    Raises:
        NotImplementedError: a method that is not read.
    """
    config = quantization_config(raw)
    method = config.get("quant_method", "unknown") if config else None
    if method is None or method == dequantized:
        return None
    if method not in SCHEMES:
        raise NotImplementedError(
            f"the checkpoint is quantized ({method}), which is not read; read are "
            f"{', '.join(SCHEMES)}: use one of these, the unquantized checkpoint or a GGUF file"
        )
    return str(method)


def read_scheme(raw: Mapping[str, Any], dequantized: str | None, files: Files) -> Scheme | None:
    """The scheme of a checkpoint; errors are those of `quantization_method` and of the scheme."""
    method = quantization_method(raw, dequantized)
    return SCHEMES[method](quantization_config(raw), files) if method else None

"""Quantized checkpoints: a file for each scheme, and the table of them.

Owns the choice of the scheme. Never reads a file.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nv_models.fields import flag, naming, strings, table
from nv_models.quantization.awq import AWQScheme
from nv_models.quantization.compressed_tensors import CompressedTensorsScheme
from nv_models.quantization.float_to_fp8 import FloatToFp8Scheme
from nv_models.quantization.form import Files
from nv_models.quantization.fp8 import Fp8Scheme
from nv_models.quantization.gguf import BlockFiles, GGUFScheme
from nv_models.quantization.gptq import GPTQScheme
from nv_models.quantization.scheme import Scheme


def read_fp8(config: Mapping[str, Any], files: Files) -> Scheme:
    """The scheme of `quant_method: "fp8"`, whose files may still be in floats."""
    if flag({"is_checkpoint_fp8_serialized": True, **config}, "is_checkpoint_fp8_serialized"):
        return Fp8Scheme(config, files)
    names = strings(config, "modules_to_not_convert") + strings(config, "ignored_layers")
    return FloatToFp8Scheme(files, names)


SCHEMES: dict[str, Callable[[Mapping[str, Any], Files], Scheme]] = {
    "awq": AWQScheme,
    "compressed-tensors": CompressedTensorsScheme,
    "fp8": read_fp8,
    "gptq": GPTQScheme,
}
"""By `quant_method`."""
GGUF = GGUFScheme.name
OPTIONS: dict[str | None, str | None] = {
    None: None,
    **{name: name for name in SCHEMES},
    "awq_marlin": "awq",
    "gguf": GGUF,
    "gptq_marlin": "gptq",
    **dict.fromkeys(("fp8_per_block", "fp8_per_channel", "fp8_per_tensor"), "fp8"),
}
"""Values of the option `quantization`, with vLLM's other names, and the scheme of each."""
BLOCK_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}
"""In which a kind of device has products of blocks."""
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
    if config and "quant_method" not in config:
        raise NotImplementedError(
            f"the quantization_config {dict(config)!r:.200} has no quant_method: it must be one of "
            f"{', '.join(SCHEMES)}; add it, or use the unquantized checkpoint or a GGUF file"
        )
    method = config.get("quant_method")
    if config and not isinstance(method, str):
        raise ValueError(
            f"quant_method of the quantization_config is {method!r:.200}: it must be one of "
            f"{', '.join(SCHEMES)}"
        )
    if method is None or method == dequantized:
        return None
    if method not in SCHEMES:
        raise NotImplementedError(
            f"the checkpoint is quantized ({method}), which is not read; read are "
            f"{', '.join(SCHEMES)}: use one of these, the unquantized checkpoint or a GGUF file"
        )
    return str(method)


def read_scheme(
    raw: Mapping[str, Any],
    dequantized: str | None,
    files: Files,
    option: str | None = None,
    *,
    name: str,
) -> Scheme | None:
    """The scheme of a checkpoint.

    Args:
        raw: the fields of config.json.
        dequantized: as in `quantization_method`.
        files: the checkpoint's tensors.
        name: of the file with the quantization_config, in errors.
        option: a name of OPTIONS that must agree with the checkpoint; "fp8" quantizes one in
            floats while it loads. None: as the checkpoint is.

    Raises:
        NotImplementedError: a method, a variant or an option that is not built.
        ValueError: the option and the checkpoint disagree, or a field has a wrong type.
    """
    method = quantization_method(raw, dequantized)
    asked = checked_option(option)
    if asked is None or asked == method:
        with naming(name):
            return SCHEMES[method](quantization_config(raw), files) if method else None
    if asked == "fp8" and method is None and not quantization_config(raw):
        if dequantized is not None:
            raise NotImplementedError(
                "quantization='fp8' does not quantize this architecture's experts: leave it at None"
            )
        return FloatToFp8Scheme(files)
    found = quantization_config(raw).get("quant_method")
    raise _disagreement(option, f"quantized as {found!r}" if found else "in floats")


def gguf_scheme(
    files: BlockFiles, device: torch.device, dtype: torch.dtype, option: str | None
) -> Scheme | None:
    """The scheme of a GGUF file; None: all of it is dequantized while it loads.

    Args:
        files: its tensors.
        device: where the model computes.
        dtype: of what is dequantized.
        option: a name of OPTIONS that must agree with it.

    Raises:
        NotImplementedError: as `read_scheme`.
        ValueError: the option and the file disagree.
    """
    if checked_option(option) not in (None, GGUF):
        raise _disagreement(option, "a GGUF file")
    if dtype not in BLOCK_DTYPES.get(device.type, ()):
        return None
    return GGUFScheme(files, dtype, is_on_card=device.type == "cuda")


def _disagreement(option: str | None, found: str) -> ValueError:
    return ValueError(
        f"quantization is {option!r}, and the checkpoint is {found}: leave quantization at None, "
        "which reads what the checkpoint is"
    )


def checked_option(option: str | None) -> str | None:
    """The scheme that the option `quantization` names.

    Raises:
        NotImplementedError: a name that is not in OPTIONS.
    """
    if option not in OPTIONS:
        names = ", ".join(repr(name) for name in OPTIONS if name is not None)
        raise NotImplementedError(
            f"quantization={option!r} is not built: it must be one of {names}, or None to read "
            "what the checkpoint is"
        )
    return OPTIONS[option]

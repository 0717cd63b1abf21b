"""From a path to a model that runs.

Owns the order of the steps, and the choice of format and dtype. Never moves a model: its tensors
are made on their device.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import nv_kernels as nk
import torch

from nv_models.adapters import AdapterPool
from nv_models.architectures import ARCHITECTURES, model_class
from nv_models.causal import CausalLM
from nv_models.checkpoint import Checkpoint
from nv_models.checkpoint.gguf import require_extra
from nv_models.checkpoint.joined import HEAD, SCORE, JoinedCheckpoint
from nv_models.checkpoint.mxfp4 import MXFP4Checkpoint, is_packed
from nv_models.checkpoint.pytorch import PyTorchCheckpoint
from nv_models.checkpoint.safetensors import SafetensorsCheckpoint
from nv_models.config import DTYPES, ModelConfig
from nv_models.fields import naming
from nv_models.locate import gguf_in, resolve
from nv_models.parallel import TensorParallel
from nv_models.placement import Placement
from nv_models.pooling.pooler import DENSE, Pooler
from nv_models.pooling.pooler_config import PoolerConfig, bounded
from nv_models.quantization import gguf_scheme, read_scheme
from nv_models.quantization.form import NoFiles
from nv_models.quantization.gguf import block_files
from nv_models.read_config import ConfigFiles
from nv_models.weights import allocate, bytes_per_value, count_bytes, fill_dummy, load_weights

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
WANTED = {
    "auto": "*.safetensors, pytorch_model*.bin or *.gguf",
    "safetensors": "*.safetensors",
    "pt": "pytorch_model*.bin",
    "gguf": "*.gguf",
}
"""Files by format."""


@dataclass(frozen=True)
class ModelPlan:
    """A model that is planned and not made yet.

    Attributes:
        config: of the model, its dtype decided.
        placement: of this rank's share.
        checkpoint: the open files; None: random weights.
        seed: of the random weights.
        pooler: what it makes of hidden states; None: logits.
    """

    config: ModelConfig
    placement: Placement
    checkpoint: Checkpoint | None
    seed: int
    pooler: PoolerConfig | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return count_bytes(self._allocated, on_card=self.placement.device.type == "cuda")

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights by which a layer multiplies a token, on this rank."""
        values = self.config.layer_parameters // self.placement.parallel.size
        return round(values * bytes_per_value(self._allocated))

    def adapter_bytes(self, num_slots: int, max_rank: int, dtype: torch.dtype | None = None) -> int:
        """Bytes on this rank of an `AdapterPool` with these arguments."""
        return AdapterPool(self._outline(), num_slots, max_rank, dtype).num_bytes

    def load(self) -> CausalLM:
        """Make the model and fill it.

        Raises:
            ValueError: the checkpoint does not fit the model, or its embedding, its head or its
                last norm is all zeros.

        Warns:
            UserWarning: the files hold another head than the embedding, which the model ties, or
                other matrices that are all zeros.
        """
        model = self._build(self.placement).eval()
        if self.checkpoint:
            rank = self.placement.parallel.rank
            load_weights(model, self._allocated, self.checkpoint, rank)
        else:
            fill_dummy(model, self.seed, self.placement.device)
        if (scheme := self.placement.scheme) and self.placement.parallel.rank == 0:
            scheme.warn_of_dequantized(
                self.checkpoint.place if self.checkpoint else "random weights"
            )
        return model

    @cached_property
    def _allocated(self) -> CausalLM:
        """The outline, made once: with experts it takes seconds. Only to be read."""
        return self._outline()

    def _outline(self) -> CausalLM:
        """The model with all its tensors, on meta."""
        model = self._build(replace(self.placement, device=torch.device("meta")))
        with self._naming():
            allocate(model)
        return model

    def _naming(self) -> AbstractContextManager[None]:
        """Put the checkpoint's name before an error about its quantized matrices."""
        return naming(self.checkpoint.place) if self.checkpoint else nullcontext()

    def _build(self, placement: Placement) -> CausalLM:
        """The model without its large tensors."""
        model: CausalLM = model_class(self.config.architecture)(self.config, placement)
        if self.pooler is not None:
            model.pooler = Pooler(self.pooler, placement)
        return model


def plan_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    parallel: TensorParallel = TensorParallel(),  # noqa: B008  # frozen
    load_format: str = "auto",
    seed: int = 0,
    arithmetic: str = "fast",
    max_positions: int | None = None,
    pooler: PoolerConfig | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    files: ConfigFiles | None = None,
    quantization: str | None = None,
) -> ModelPlan:
    """Decide how a checkpoint's model is loaded, without making any of it.

    Args:
        path: anything `resolve` takes; usually the folder that it returned.
        device: where the weights live.
        dtype: what they are converted to; "auto" is the checkpoint's own.
        parallel: this rank's place; only its shards are read.
        load_format: "safetensors", "pt" (`pytorch_model.bin`), "gguf", "auto" (the first of
            these that the folder holds), or "dummy": random weights, of which only config.json is
            needed.
        seed: of the random weights.
        arithmetic: "fast" or "batch_invariant", as `nk.arithmetic`; attention needs the backend
            that it names too.
        max_positions: the longest sequence that will come, if shorter than what the checkpoint
            promises: the rotary embedding's table ends there.
        pooler: what the model makes of hidden states in place of logits, as `read_pooler` found it.
        hf_overrides: fields in place of those of config.json.
        files: both config files with these overrides, if `describe` has read them already.
        quantization: a name of `quantization.OPTIONS`, with which the checkpoint must agree;
            "fp8" quantizes a checkpoint in floats while it loads.

    Raises:
        FileNotFoundError: no config.json, no weights, or a missing shard.
        ValueError: an unsupported architecture, format, dtype or parallel size.
        NotImplementedError: weights that are quantized in a way that is not read.

    Warns:
        UserWarning: on rank 0, that an EOS id past the vocabulary was left out.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(
            f"load_format is {load_format!r}: it must be one of {', '.join(LOAD_FORMATS)}"
        )
    folder = resolve(path)
    files = files or ConfigFiles.read(folder, hf_overrides)
    config = bounded(files.model_config(), pooler)
    if parallel.rank == 0:
        files.warn_of_undrawable(config.vocab_size)
        files.warn_of_unread()
    if dtype == "auto" and config.dtype is None:
        refuse_stated_dtype(folder / "config.json", files.raw)
    opened = None if load_format == "dummy" else open_checkpoint(folder, load_format)
    stored = config.dtype or (opened.dtype() if opened else torch.float32)
    placed = torch.device(device)
    chosen = choose_dtype(dtype, stored, placed)
    longest = min(max_positions or config.max_length, config.max_length)
    config = replace(config, dtype=chosen, max_length=longest, has_head=pooler is None)
    checkpoint = None if opened is None else joined(opened, pooler)
    row = ARCHITECTURES[config.architecture]
    if blocks := block_files(opened):
        scheme = gguf_scheme(blocks, placed, chosen, quantization)
    else:
        scheme = read_scheme(
            files.raw,
            row.quantization,
            checkpoint or NoFiles(),
            quantization,
            name=files.quantization_name,
        )
    placement = Placement(placed, chosen, parallel, nk.arithmetic(arithmetic), scheme)
    return ModelPlan(config, placement, checkpoint, seed, pooler)


def load_model(path: str | Path, **options: Any) -> CausalLM:  # noqa: ANN401
    """Build a checkpoint's model and fill it: `plan_model(path, **options).load()`.

    Returns:
        The model, whose `config.dtype` is the dtype it was loaded in.

    Raises:
        FileNotFoundError: as `plan_model`.
        ValueError: as `plan_model`, or a checkpoint that does not fit the model; nothing was run.
    """
    return plan_model(path, **options).load()


def joined(body: Checkpoint, pooler: PoolerConfig | None) -> JoinedCheckpoint:
    """The model's own files, and those of a pooler's Dense layers.

    Nothing reads the head of a classifier that is loaded for embeddings, or a head for tokens whose
    rows do not stand for labels: it may be quantized.
    """
    dense = pooler.dense if pooler else ()
    folders = {DENSE.format(index): layer.folder for index, layer in enumerate(dense)}
    parts = {name: open_checkpoint(folder, "auto") for name, folder in folders.items()}
    unused: tuple[str, ...] = ()
    if pooler is not None:
        reads_head = bool(pooler.label_tokens) and pooler.label_source.startswith(HEAD)
        if reads_head:
            refuse_quantized_head(body, pooler.label_source)
        unused = () if reads_head else (HEAD,)
        unused += (SCORE,) if pooler.kind == "embed" else ()
    return JoinedCheckpoint(body, parts, unused)


def refuse_quantized_head(body: Checkpoint, source: str) -> None:
    """Raise ValueError where the rows of labels' tokens would be cut from codes."""
    if source not in body.shapes and any(name.startswith(HEAD) for name in body.shapes):
        raise ValueError(
            f"{body.place}: lm_head is quantized, and the rows of classifier_from_token are read "
            "from one in floats only: use a checkpoint whose lm_head is in floats"
        )


def open_checkpoint(folder: Path, load_format: str) -> Checkpoint:
    """The folder's weights in the wanted format."""
    if load_format in {"auto", "safetensors"} and any(folder.glob("*.safetensors*")):
        found = SafetensorsCheckpoint(folder)
        return MXFP4Checkpoint(found) if any(map(is_packed, found.shapes)) else found
    if load_format in {"auto", "pt"} and any(folder.glob("pytorch_model*.bin*")):
        return PyTorchCheckpoint(folder)
    if load_format in {"auto", "gguf"} and (file := gguf_in(folder)):
        require_extra()
        from nv_models.checkpoint.gguf.tensors import GGUFCheckpoint  # noqa: PLC0415

        return GGUFCheckpoint(file)
    wanted = WANTED[load_format]
    raise FileNotFoundError(
        f"{folder} has no weights: no {wanted} in it; download or convert them, "
        'or pass load_format="dummy" for random ones'
    )


def refuse_stated_dtype(config_file: Path, values: Mapping[str, Any]) -> None:
    """Raise ValueError where config.json names a dtype, though ModelConfig knew none."""
    for name in ("dtype", "torch_dtype"):
        if (value := values.get(name)) is not None:
            raise ValueError(
                f"{config_file}: {name} is {value!r}: it must be one of {', '.join(DTYPES)}; mend "
                "it, or pass dtype=…"
            )


def choose_dtype(
    dtype: torch.dtype | str, stored: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype to compute in.

    Raises:
        ValueError: not one of the three, or one that the device does not have.
    """
    name = str(stored if dtype == "auto" else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}: it must be auto, {', '.join(DTYPES)}")
    chosen = DTYPES[name]
    if chosen == torch.bfloat16 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ValueError(f"{device} (compute {capability}) has no bfloat16; use float16")
    return chosen

"""Tiny random checkpoints, written by transformers, and a step through a paged cache."""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import nv_kernels as nk
import pytest
import torch
import transformers
from nv_models import CausalLM, ForwardContext

BLOCK_SIZE = 16


def load_beside(name: str) -> ModuleType:
    """A module of this folder, which is on no path under importlib mode."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY_MODELS = load_beside("tiny_models")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def write_tiny_checkpoint(
    folder: Path,
    kind: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    spelling: str = "rope_parameters",
    rope: dict | None = None,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a random 2-layer checkpoint whose argmax is stable; returns the folder.

    `rope` holds rope_type and its parameters without rope_theta. `spelling` is how config.json
    says it: "rope_parameters" as transformers 5 writes it, or "rope_theta" as version 4 did.
    """
    sizes: dict = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    sizes.update(overrides)
    theta = 10000.0
    sizes["rope_parameters"] = {"rope_type": "default", **(rope or {}), "rope_theta": theta}
    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }
    config_class, model_class = classes[kind]
    model = model_class(config_class(**sizes))
    TINY_MODELS.randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    if spelling == "rope_theta":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = rope
        file.write_text(json.dumps(config))
    return folder


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """A function that writes a tiny checkpoint into this test's folder."""

    def write(kind: str = "qwen3", name: str = "model", **options: object) -> Path:
        return write_tiny_checkpoint(tmp_path / name, kind, **options)

    return write


@pytest.fixture(scope="session")
def float_checkpoint(tmp_path_factory):
    """A tiny checkpoint of floats, written once: only to be read."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("floats") / "model")


@pytest.fixture(scope="session")
def packed():
    """The module that writes AWQ and GPTQ checkpoints."""
    return load_beside("packed_writer")


@pytest.fixture(scope="session")
def experts_writer():
    """The module that writes mixtures of experts of codes."""
    return load_beside("experts_writer")


@pytest.fixture
def paged_runner():
    """The class that runs one sequence through a paged cache."""
    return PagedRunner


class PagedRunner:
    """One sequence through a model's paged cache, its blocks in a shuffled order."""

    def __init__(self, model: CausalLM, num_blocks: int = 16, size: int = 1):
        config = model.config
        kv_heads = max(config.num_kv_heads // size, 1)
        self.model = model
        self.length = 0
        self.backend = nk.attention_backend(
            "torch",
            device=torch.device("cpu"),
            dtype=config.dtype,
            num_q_heads=config.num_q_heads // size,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            specs=[layer.attention for layer in config.layers],
        )
        layout = self.backend.kv_layout(num_blocks, config.dtype)
        self.kv = [layout.allocate(torch.device("cpu")) for _ in range(config.num_layers)]
        order = torch.Generator().manual_seed(7)
        self.blocks = torch.randperm(num_blocks, generator=order).int()

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int], adapter: int | None = None) -> torch.Tensor:
        """Logits [T, V] of the next tokens of the sequence, with the adapter in a slot."""
        positions = torch.arange(self.length, self.length + len(token_ids))
        self.length += len(token_ids)
        slots = self.blocks[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        attention = nk.AttentionMetadata(
            query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.blocks[None],
            max_query_len=len(token_ids),
            max_context_len=self.length,
            num_decodes=1 if len(token_ids) == 1 else 0,
        )
        plans = self.backend.plan(attention, self.model.config.windows)
        lora = None
        if adapter is not None:
            adapters = torch.full((len(token_ids),), adapter, dtype=torch.int32)
            lora = nk.lora_plan(adapters, 8, len(token_ids))
        context = ForwardContext(
            positions, slots, attention, plans, self.backend, self.kv, lora, lora
        )
        hidden = self.model(torch.tensor(list(token_ids)), context)
        return self.model.logits(hidden, lora)


@pytest.fixture
def write_gguf():
    """The function that writes a tiny checkpoint as a GGUF file."""
    return load_beside("gguf_writer").write_gguf


@pytest.fixture
def write_header():
    """A function that writes a GGUF file of an architecture, with metadata and no tensors."""
    module = load_beside("gguf_writer")

    def write(file: Path, architecture: str, values: dict) -> None:
        writer = module.GGUFWriter(file, architecture)
        module.add_values(writer, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def tensors_of(model: CausalLM) -> list[torch.Tensor]:
    """Each tensor of a loaded model once; of a tied embedding the table, not the head's copy."""
    tensors = [weight.values for weight in (getattr(m, "weight", None) for m in model.modules())
               if isinstance(weight, nk.Weight)]  # fmt: skip
    if not model.config.tie_word_embeddings:
        tensors.append(model.lm_head.head.values)
    return [*model.parameters(), *tensors]


@pytest.fixture
def loaded_tensors():
    return tensors_of


@pytest.fixture(scope="session")
def adapters():
    """The module that writes adapters."""
    return load_beside("adapter_writer")


@pytest.fixture(scope="session")
def tiny_models():
    """The module that writes a tiny checkpoint of each architecture."""
    return TINY_MODELS


@pytest.fixture
def tiny_post_norm(tiny_models, tmp_path):
    """A tiny checkpoint as opt-350m is: norms after attention and MLP, a narrow embedding."""
    changes = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}
    return tiny_models.write_tiny_model(tmp_path / "post_norm", "OPT", **changes)


@pytest.fixture(scope="session")
def tiny_model(tiny_models, tmp_path_factory):
    """A function that returns the folder of an architecture's tiny checkpoint, written once."""
    folder = tmp_path_factory.mktemp("tiny_models")

    def find(name: str) -> Path:
        if not (folder / name).exists():
            tiny_models.write_tiny_model(folder / name, name)
        return folder / name

    return find

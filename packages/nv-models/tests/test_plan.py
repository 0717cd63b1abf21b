"""A plan knows the bytes and the dtype of a model before any of it is made."""

import json

import pytest
import torch
from nv_models import TensorParallel, load_model, plan_model


@pytest.fixture
def bytes_of(loaded_tensors):
    return lambda model: sum(each.nbytes for each in loaded_tensors(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_bytes_are_those_of_the_model(tiny_checkpoint, bytes_of, kind, dtype, tied):
    folder = tiny_checkpoint(kind, tie_word_embeddings=tied)
    plan = plan_model(folder, dtype=dtype)
    assert plan.num_bytes == bytes_of(load_model(folder, dtype=dtype))
    assert plan.config.dtype == plan.placement.dtype == getattr(torch, dtype)


def test_a_rank_counts_its_own_share(tiny_checkpoint, bytes_of):
    folder, half = tiny_checkpoint(), TensorParallel(0, 2)
    size = plan_model(folder, parallel=half).num_bytes
    assert size == bytes_of(load_model(folder, parallel=half))
    assert size < plan_model(folder).num_bytes


def test_no_weight_is_made_for_a_plan(tiny_checkpoint):
    folder = tiny_checkpoint()
    file = folder / "config.json"
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 100}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    num_bytes = plan_model(folder, load_format="dummy").num_bytes
    assert num_bytes > 2**44, "no test machine has as much"

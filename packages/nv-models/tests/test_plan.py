"""A plan knows the bytes and the dtype of a model before any of it is made."""

import json

import pytest
import torch
from nv_models import TensorParallel, load_model, plan_model
from nv_models.layers.linear import Linear


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


@pytest.fixture
def made(monkeypatch):
    """The steps of matrices with memory, in order."""
    steps = []
    for step in ("allocate", "finish"):
        original = getattr(Linear, step)

        def noted(module, *name, original=original, step=step):
            if module.placement.device.type != "meta":
                steps.append((step, id(module)))
            original(module, *name)

        monkeypatch.setattr(Linear, step, noted)
    return steps


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_matrix_is_finished_before_the_next_is_made(tiny_checkpoint, made, load_format):
    load_model(tiny_checkpoint(), load_format=load_format)
    assert [step for step, _ in made] == ["allocate", "finish"] * 8
    modules = [module for _, module in made]
    assert modules[::2] == modules[1::2]


def test_nothing_is_made_of_files_that_do_not_fit(tiny_checkpoint, made):
    folder = tiny_checkpoint()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"layers\.2\.\S+ \[\d+(, \d+)?\] is missing"):
        load_model(folder)
    assert not made


def test_bytes_of_a_layer(tiny_checkpoint):
    folder = tiny_checkpoint()
    values = 128 * 64 * (2 * 4 + 2 * 2) + 3 * 128 * 192
    assert plan_model(folder, dtype="float32").layer_bytes == 4 * values
    assert plan_model(folder, parallel=TensorParallel(0, 2)).layer_bytes == 4 * values // 2
    fp8 = plan_model(folder, quantization="fp8").layer_bytes
    assert fp8 == values + 4 * (512 + 128 + 2 * 192 + 128)  # a scale per row

"""Weights that take more than they may are refused before any is made."""

import pytest
from nv_models import TensorParallel, load, load_model


def num_bytes(model):
    return sum(each.numel() * each.element_size() for each in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_byte_decides(tiny_checkpoint, dtype, monkeypatch):
    folder = tiny_checkpoint()
    size = num_bytes(load_model(folder, dtype=dtype))
    assert num_bytes(load_model(folder, dtype=dtype, max_bytes=size)) == size
    monkeypatch.setattr(load, "load_weights", None)  # it does not come so far
    wider = dtype == "float32"
    with pytest.raises(ValueError, match=r"weights take 0\.00 GiB .* smaller model") as error:
        load_model(folder, dtype=dtype, max_bytes=size - 1)
    assert ('dtype="bfloat16"' in str(error.value)) == wider


def test_a_rank_counts_its_own_share(tiny_checkpoint):
    folder, half = tiny_checkpoint(), TensorParallel(0, 2)
    size = num_bytes(load_model(folder, parallel=half))
    assert size < num_bytes(load_model(folder))
    load_model(folder, parallel=half, max_bytes=size)
    with pytest.raises(ValueError, match="tensor_parallel_size 2"):
        load_model(folder, parallel=half, max_bytes=size - 1)

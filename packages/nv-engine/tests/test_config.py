from collections.abc import Iterable

import numpy as np
import pytest
from nv_engine.config import EngineConfig
from nv_kernels.attention.select import BACKENDS
from nv_models.config import DTYPES
from nv_models.load import LOAD_FORMATS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_model_len", 1),
        ("max_in_flight", -1),
        ("max_in_flight", 65),
        ("max_in_flight", 10**6),
        ("max_burst", 0),
        ("max_burst", 1025),
        ("max_burst", True),
        ("num_kvcache_blocks", 0),
        ("kvcache_block_size", 8),
        ("kvcache_block_size", 48),
        ("kvcache_block_size", 100),
        ("kvcache_block_size", 2**31),
        ("kvcache_block_size", 64 * 10**100),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("seed", "x"),
        ("swap_space", -1),
        ("swap_space", float("nan")),
        ("dtype", "int8"),
        ("attention_backend", "flashinfer"),
        ("load_format", "pickle"),
        ("gpu_memory_utilization", "0.9"),
        ("swap_space", "4"),
        ("max_num_seqs", 10**30),
        ("kv_cache_dtype", "int4"),
        ("quantization", 4),
        ("distributed_executor_backend", "mpi"),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 9),
    ],
)
def test_out_of_range_names_option_and_value(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option) as error:
        EngineConfig(model="m", **{option: value})
    assert str(value) in str(error.value)


def test_quantizations_that_are_built() -> None:
    for name in (None, "fp8", "awq", "gptq_marlin", "compressed-tensors", "fp8_per_channel"):
        assert EngineConfig(model="m", quantization=name).quantization == name
    with pytest.raises(NotImplementedError, match=r"quantization='bnb' is not built: .* 'awq', "):
        EngineConfig(model="m", quantization="bnb")


def test_deterministic_has_its_own_attention() -> None:
    assert EngineConfig(model="m", deterministic=True).deterministic
    with pytest.raises(ValueError, match="leave attention_backend at"):
        EngineConfig(model="m", deterministic=True, attention_backend="torch")


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("attention_backend", ("auto", *BACKENDS)),
        ("load_format", LOAD_FORMATS),
        ("dtype", ("auto", *DTYPES)),
    ],
)
def test_names_are_those_of_the_package_that_has_them(option: str, names: Iterable[str]) -> None:
    for name in names:
        assert getattr(EngineConfig(model="m", **{option: name}), option) == name
    with pytest.raises(ValueError, match=f"{option} is 'x': it must be one of 'auto', ") as error:
        EngineConfig(model="m", **{option: "x"})
    assert all(repr(name) in str(error.value) for name in names)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 192, 256, 1024])
def test_block_sizes(size: int) -> None:
    assert EngineConfig(model="m", kvcache_block_size=size).kvcache_block_size == size


@pytest.mark.parametrize(
    ("option", "low", "high"), [("max_in_flight", 0, 64), ("max_burst", 1, 1024)]
)
def test_steps_that_are_out_are_bounded(option: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(EngineConfig(model="m", **{option: value}), option) == value
    for value in (low - 1, high + 1):
        message = f"{option} is {value}: it must be an integer from {low} to {high}"
        with pytest.raises(ValueError, match=message):
            EngineConfig(model="m", **{option: value})


def test_numbers_are_made_plain() -> None:
    given = {"max_num_seqs": np.int64(3), "kvcache_block_size": np.int32(64), "seed": np.int8(5)}
    config = EngineConfig(model="m", gpu_memory_utilization=np.float32(0.5), **given)
    assert config == EngineConfig(
        model="m", max_num_seqs=3, kvcache_block_size=64, seed=5, gpu_memory_utilization=0.5
    )
    for name in (*given, "gpu_memory_utilization"):
        assert type(getattr(config, name)) in (int, float)


@pytest.mark.parametrize("seed", [-(2**70), 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert EngineConfig(model="m", seed=seed).seed == seed
    with pytest.raises(ValueError, match=r"seed is 1\.5: it must be an integer$"):
        EngineConfig(model="m", seed=1.5)


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig(model="m").seed = 3

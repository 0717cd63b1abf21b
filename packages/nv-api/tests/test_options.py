import dataclasses
import warnings

import numpy as np
import pytest
import torch
from nv_api import LLM
from nv_api.option_names import ADVICE, INSTEAD, RENAMED
from nv_api.options import (
    ALIASES,
    NO_DIFFERENCE,
    TOKENIZER,
    UNBUILT,
    parse,
    warn_of_length,
)
from nv_engine import EngineConfig

DEFAULTS = {
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 512,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "enforce_eager": False,
    "kvcache_block_size": 256,
    "num_kvcache_blocks": -1,
    "max_in_flight": 1,
    "deterministic": False,
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "dtype": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "revision": None,
    "trust_remote_code": False,
    "seed": 0,
    "swap_space": 4,
    "enable_prefix_caching": True,
    "attention_backend": "auto",
    "device": "auto",
    "load_format": "auto",
    "distributed_executor_backend": None,
}
"""The contract's table."""


def test_every_option_of_the_contract_is_known_with_its_default():
    assert parse("m", DEFAULTS) == parse("m", {})
    known = {field.name for field in dataclasses.fields(EngineConfig)} | set(TOKENIZER)
    assert set(DEFAULTS) <= known


def test_options_reach_the_engine_and_the_tokenizer():
    asked = parse("m", {"max_model_len": None, "seed": 7, "tokenizer": "t", "dtype": "float32"})
    assert asked.engine == EngineConfig(model="m", max_model_len=None, seed=7, dtype="float32")
    assert asked.tokenizer == "t"


def test_numbers_of_numpy_and_torch_are_taken():
    given = {"block_size": np.int32(64), "seed": torch.tensor(3), "enforce_eager": np.True_}
    plain = {"block_size": 64, "seed": 3, "enforce_eager": True, "gpu_memory_utilization": 0.5}
    asked = parse("m", given | {"gpu_memory_utilization": np.float32(0.5)})
    assert asked == parse("m", plain)
    with pytest.raises(NotImplementedError, match=r"cpu_offload_gb=\[1, 2\] is not built"):
        parse("m", {"cpu_offload_gb": np.array([1, 2])})


def test_aliases_and_only_one_of_two_names():
    asked = parse("m", {"block_size": 16, "num_gpu_blocks_override": 9})
    assert (asked.engine.kvcache_block_size, asked.engine.num_kvcache_blocks) == (16, 9)
    with pytest.raises(TypeError, match="kvcache_block_size and block_size are one option"):
        parse("m", {"kvcache_block_size": 16, "block_size": 16})


def test_none_is_the_default():
    assert parse("m", {"block_size": None, "seed": None, "max_num_seqs": None}) == parse("m", {})


def test_what_is_for_several_ranks_makes_no_difference_to_one():
    options = {"disable_custom_all_reduce": True, "disable_log_stats": True}
    with pytest.warns(UserWarning, match="effect: disable_custom_all_reduce, disable_log_stats$"):
        assert parse("m", options).engine.disable_custom_all_reduce
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = parse("m", {"disable_custom_all_reduce": True, "tensor_parallel_size": 2}).engine
    assert engine.disable_custom_all_reduce


def test_what_makes_no_difference_is_accepted_with_one_warning():
    options = {"disable_log_stats": True, "max_seq_len_to_capture": 8192, "cpu_offload_gb": 0}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        asked = parse("m", options)
    (warning,) = seen
    assert str(warning.message) == (
        "accepted without effect: cpu_offload_gb, disable_log_stats, max_seq_len_to_capture"
    )
    assert asked == parse("m", {})


def test_remote_code_is_never_run_and_a_warning_reports_it():
    with pytest.warns(UserWarning, match="never run"):
        parse("m", {"trust_remote_code": True})


def test_overrides_of_the_config_reach_the_engine():
    assert parse("m", {"hf_overrides": {"a": {"b": 1}}}).engine.hf_overrides == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="hf_overrides is 'x': it must be a dict"):
        parse("m", {"hf_overrides": "x"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_seqs", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"),
    ],
)
def test_an_unknown_option_names_the_nearest_known_one(name, nearest):
    with pytest.raises(TypeError, match=f"no option '{name}': did you mean '{nearest}'"):
        parse("m", {name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("n_ctx", "did you mean 'max_model_len'?"),
        ("max_seq_len", "did you mean 'max_model_len'?"),
        ("max_length", "pass max_model_len here, or SamplingParams(max_tokens=…) to each call"),
        ("tp_size", "did you mean 'tensor_parallel_size'?"),
        ("mem_fraction_static", "did you mean 'gpu_memory_utilization'?"),
        ("batch_size", "did you mean 'max_num_seqs'?"),
        ("torch_dtype", "did you mean 'dtype'?"),
        ("device_map", "did you mean 'device'?"),
        ("attn_implementation", "did you mean 'attention_backend'?"),
        ("load_in_4bit", "the checkpoint decides: give a quantized one, such as a .gguf file"),
        ("cache_dir", "set the environment variable HF_HOME to the folder for downloads"),
        ("token", "set the environment variable HF_TOKEN"),
        ("chat_template", "pass it to chat"),
        ("max_new_tokens", "pass SamplingParams(max_tokens=…)"),
        ("max_tokens", "pass SamplingParams(max_tokens=1)"),
        (
            "guided_json",
            "in SamplingParams, pass structured_outputs=StructuredOutputsParams(json=…)",
        ),
        ("stream", "call stream of LLM, or generate of AsyncLLM"),
        ("tool_call_parser", "it is an option of nv serve"),
        ("disable_radix_cache", "pass enable_prefix_caching=False"),
        ("guided_decoding_backend", "it would change nothing here: leave it out"),
    ],
)
def test_16_an_option_of_another_library_gets_the_right_hint(name, hint):
    with pytest.raises(TypeError) as error:
        parse("m", {name: 1})
    assert str(error.value) == f"LLM has no option {name!r}: {hint}"


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("pooler_config", {"pooling_type": "MEAN"}, "pass PoolingParams(…) to each call"),
        ("override_pooler_config", {"normalize": True}, "pass PoolingParams(…) to each call"),
        ("kv_cache_memory_bytes", 10**9, "pass num_kvcache_blocks, or gpu_memory_utilization"),
        ("attention_config", {"backend": "FLASH_ATTN"}, "pass attention_backend"),
        ("nnodes", 2, "pass distributed_executor_backend='ray', which finds the nodes"),
        ("data_parallel_rank", 1, "make an LLM for each card, or use nv_api.ray.NvPredictor"),
        ("decode_context_parallel_size", 2, "leave decode_context_parallel_size out"),
    ],
)
def test_16_an_option_of_vllm_that_is_not_built_gets_its_own_advice(name, value, hint):
    with pytest.raises(NotImplementedError) as error:
        parse("m", {name: value})
    assert str(error.value).startswith(f"{name}={value!r} is not built yet: ")
    assert str(error.value).endswith(hint)


@pytest.mark.parametrize(
    "options",
    [
        {"stream_interval": 10, "optimization_level": 2, "cudagraph_capture_sizes": [1, 2]},
        {"mamba_cache_dtype": "auto", "enable_dbo": True, "enable_log_requests": True},
        {"nnodes": 1, "node_rank": 0, "disable_sliding_window": False, "worker_cls": "auto"},
    ],
)
def test_16_options_of_vllm_that_change_nothing_here_are_accepted(options):
    with pytest.warns(UserWarning, match=f"effect: {', '.join(sorted(options))}"):
        assert parse("m", options) == parse("m", {})


def test_16_hints_name_options_and_no_option_has_another_hint():
    ours = {field.name for field in dataclasses.fields(EngineConfig)} | TOKENIZER.keys()
    assert set(RENAMED.values()) <= ours
    assert not (ours | ALIASES.keys()) & (RENAMED.keys() | ADVICE.keys())
    assert not RENAMED.keys() & ADVICE.keys()
    assert UNBUILT.keys() >= INSTEAD.keys() - ours  # an option that is built later needs no advice


@pytest.mark.parametrize("options", [{"disable_log_stats": True}, {"trust_remote_code": True}])
def test_16_a_warning_of_an_option_shows_the_user_s_line(options, tmp_path):
    with pytest.warns(UserWarning, match="accepted") as seen, pytest.raises(FileNotFoundError):
        LLM(str(tmp_path / "nowhere"), **options)
    assert [each.filename for each in seen] == [__file__]


def test_an_unknown_option_near_to_none():
    with pytest.raises(TypeError, match="no option 'zzzzzz': there are attention_backend"):
        parse("m", {"zzzzzz": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [("speculative_config", {"model": "x"})],
)
def test_what_is_not_built_yet_is_refused(name, value):
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not built yet: leave {name}"):
        parse("m", {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", 17, "kvcache_block_size is 17: it must be 16, 32 or a multiple of 64"),
        ("max_num_seqs", True, "max_num_seqs is True: it must be an integer from 1 to 2147483647"),
        ("gpu_memory_utilization", True, "gpu_memory_utilization is True: it must be a number"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization is '0.9': it must be a number"),
        (
            "gpu_memory_utilization",
            1.5,
            r"gpu_memory_utilization is 1.5: it must be a number in \(0, 1\]",
        ),
        ("swap_space", "4", "swap_space is '4': it must be a number"),
        ("enforce_eager", 1, "enforce_eager is 1: it must be True or False"),
        ("enable_prefix_caching", "no", "enable_prefix_caching is 'no': it must be True or False"),
        ("skip_tokenizer_init", "no", "skip_tokenizer_init is 'no': it must be True or False"),
        (
            "load_format",
            5,
            "load_format is 5: it must be one of 'auto', 'safetensors', 'pt', 'gguf', 'dummy'",
        ),
        ("dtype", np.float32, "dtype is \"<class 'numpy.float32'>\": it must be one of 'auto'"),
        ("revision", 5, "revision is 5: it must be a name"),
        ("tokenizer", "", "tokenizer is '': it must be a name that is not empty"),
    ],
)
def test_values_are_checked(name, value, message):
    with pytest.raises(ValueError, match=message):
        parse("m", {name: value})


class Index:
    """An integer that is none of Python's."""

    def __index__(self):
        return 300


def test_16_values_of_other_classes_reach_no_operator():
    with pytest.raises(ValueError, match="dtype is 'a int too large to show': it must be one of"):
        parse("m", {"dtype": 10**5000})
    assert parse("m", {"device": 10**5000}).engine.device == "a int too large to show"
    with pytest.warns(UserWarning, match="and the model's own length is 256 \\(a file\\)"):
        warn_of_length({"max_model_len": Index()}, 256, "a file")


def test_a_device_may_be_torchs():
    assert parse("m", {"device": torch.device("cpu")}) == parse("m", {"device": "cpu"})


def test_every_name_has_one_meaning():
    groups = [set(DEFAULTS), set(ALIASES), set(NO_DIFFERENCE), set(UNBUILT)]
    assert len(set.union(*groups)) == sum(map(len, groups))

"""Mixtures of experts: Qwen3-MoE and Mixtral against transformers, their configs and files."""

import json
import shutil
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from nv_models import TensorParallel, load_model, plan_model, read_config, resolve
from nv_models.config import Gated, Mixture
from nv_models.layers.experts import ExpertMLPs
from safetensors.torch import load_file, save_file

QWEN3 = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
PROMPT = [(37 * i + 11) % 320 for i in range(60)]


@pytest.mark.parametrize("arithmetic", ["fast", "batch_invariant"])
def test_experts_in_every_other_layer_with_weights_as_they_are(
    tiny_checkpoint, paged_runner, arithmetic
):
    options = QWEN3 | {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}
    folder = tiny_checkpoint("qwen3_moe", **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 1  # the weights are wide enough to mean something
    runner = paged_runner(load_model(folder, arithmetic=arithmetic))
    logits = torch.cat([runner.step(PROMPT[:50]), *(runner.step([id]) for id in PROMPT[50:])])
    assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_a_dense_layer_that_is_taken_for_experts_is_noticed(tiny_checkpoint):
    plan = plan_model(tiny_checkpoint("qwen3_moe", **QWEN3))
    layers = (plan.config.layers[0],) * 4
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate\.weight \[8, 128\] is missing"):
        replace(plan, config=replace(plan.config, layers=layers)).load()


SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}


class TestConfig:
    def read(self, folder, architecture, **fields):
        model_type = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral"}[architecture]
        raw = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
        (folder / "config.json").write_text(json.dumps(raw | SIZES | fields))
        return read_config(folder)

    @pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral"])
    def test_defaults_are_transformers(self, tmp_path, architecture):
        ours = self.read(tmp_path, architecture)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        kind = ours.layers[0].feed_forward
        width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert (kind.width, kind.num_experts, kind.top_k) == (
            width, theirs.num_local_experts, theirs.num_experts_per_tok,
        )  # fmt: skip
        assert kind.is_normalised == getattr(theirs, "norm_topk_prob", True)
        assert len({*ours.layers}) == 1

    @pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
    def test_both_names_of_the_number(self, tmp_path, name):
        config = self.read(tmp_path, "Qwen3Moe", **{name: 16})
        assert config.layers[0].feed_forward.num_experts == 16

    def test_which_layers_have_experts(self, tmp_path):
        fields = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
        kinds = [layer.feed_forward for layer in self.read(tmp_path, "Qwen3Moe", **fields).layers]
        assert [index for index in range(6) if isinstance(kinds[index], Mixture)] == [1, 5]
        assert kinds[0] == Gated(96)
        kinds = [
            layer.feed_forward for layer in self.read(tmp_path, "Qwen3Moe", num_experts=0).layers
        ]
        assert kinds == [Gated(96)] * 6

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_experts": 8, "num_local_experts": 4}, "num_experts is 8 and num_local_expe"),
            ({"num_experts": 4}, "num_experts_per_tok is 8: it must be at most .* experts, 4"),
            ({"num_experts": -1}, "num_experts is -1: it must be a positive integer"),
            ({"mlp_only_layers": ["1"]}, r"mlp_only_layers is \['1'\]: it must be a list"),
            ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: it must be a positive integer"),
            ({"n_shared_experts": 1, "n_routed_experts": 8}, "n_routed_experts is 8, which is not"),
        ],
    )  # fmt: skip
    def test_refusals(self, tmp_path, fields, message):
        with pytest.raises(ValueError, match=message):
            self.read(tmp_path, "Qwen3Moe", **fields)

    def test_ranks_must_divide_the_width(self, tmp_path):
        config = self.read(tmp_path, "Qwen3Moe", moe_intermediate_size=50, num_key_value_heads=8)
        with pytest.raises(ValueError, match="does not divide moe_intermediate_size = 50"):
            config.refuse_split(TensorParallel(0, 4))
        config = self.read(tmp_path, "Mixtral", intermediate_size=50)
        with pytest.raises(ValueError, match="does not divide intermediate_size = 50"):
            config.refuse_split(TensorParallel(0, 4))

    def test_parameters_by_which_a_token_is_multiplied(self, tmp_path):
        config = self.read(tmp_path, "Qwen3Moe", moe_intermediate_size=32, head_dim=16)
        attention = 64 * 16 * (2 * 8 + 2 * 4)
        assert config.layer_parameters == attention + 64 * (128 + 3 * 8 * 32)


def test_planned_bytes_are_those_of_the_weights(tiny_checkpoint, tmp_path):
    folder = tiny_checkpoint("qwen3_moe", **QWEN3)
    plan = plan_model(folder)
    tensors = load_file(folder / "model.safetensors")
    assert plan.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    shutil.rmtree(folder)  # a rank has half of everything but norms and routers
    half = plan_model(tiny_checkpoint("qwen3_moe", **QWEN3), parallel=TensorParallel(1, 2))
    whole = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if "norm" in name or name.endswith("mlp.gate.weight")
    )
    assert half.num_bytes == (plan.num_bytes - whole) // 2 + whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_are_not_held_twice(tiny_checkpoint, dtype):
    """The experts of a loaded model are the memory that was filled."""
    plan = plan_model(tiny_checkpoint("qwen3_moe", **QWEN3), load_format="dummy", dtype=dtype)
    model = plan._build(plan.placement)
    modules = [module for module in model.modules() if isinstance(module, ExpertMLPs)]
    for module in modules:
        module.allocate("")
    before = [(module.gate_up.data_ptr(), module.down.data_ptr()) for module in modules]
    assert len(modules) == 3
    for module in modules:
        module.finish()
        assert not list(module.parameters())
    after = [(m.experts.gate_up.data_ptr(), m.experts.down.data_ptr()) for m in modules]
    assert after == before
    assert all(isinstance(module.experts, nk.Experts) for module in modules)


def stacks_of(experts):
    """The values of gate and up, and of down, of plain experts or of quantized ones."""
    if isinstance(experts, nk.DenseExperts):
        return experts.gate_up, experts.down
    gates, ups, downs = (
        torch.stack([each.dense(torch.float32) for each in records])
        for records in experts.records.values()
    )
    return torch.cat((gates, ups), dim=1), downs


class TestGGUF:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
    @pytest.mark.parametrize("rank", [None, 1])
    def test_equals_the_dequantized_checkpoint(
        self, tiny_checkpoint, paged_runner, write_gguf, tmp_path, kind, rank
    ):
        options = QWEN3 | {"mlp_only_layers": [], "num_experts": 12, "moe_intermediate_size": 64}
        folder = tiny_checkpoint("qwen3_moe", **options)
        save_file(write_gguf(folder, tmp_path / "model.gguf", kind), folder / "model.safetensors")
        if rank is None:
            expected = load_model(folder, dtype="float32")
            found = load_model(tmp_path / "model.gguf", dtype="float32")
            logits = paged_runner(found).step(PROMPT)
            assert torch.equal(logits, paged_runner(expected).step(PROMPT))
            config = read_config(folder)
            assert found.config.layers == config.layers
            assert plan_model(tmp_path / "model.gguf").config.dtype == (
                torch.float16 if kind == Kind.F16 else torch.bfloat16
            )
            return
        parallel = TensorParallel(rank, 2)
        wanted = load_model(folder, parallel=parallel, dtype="float32").modules()
        found = load_model(tmp_path / "model.gguf", parallel=parallel, dtype="float32").modules()
        for ours, theirs in zip(found, wanted, strict=True):
            if hasattr(ours, "experts") and isinstance(ours.experts, nk.Experts):
                gate_up, down = stacks_of(ours.experts)
                assert torch.equal(gate_up, theirs.experts.gate_up)
                assert torch.equal(down, theirs.experts.down)

    def test_experts_of_another_architecture_are_refused(
        self, tiny_checkpoint, write_gguf, tmp_path
    ):
        folder = tiny_checkpoint("qwen3")
        metadata = {"expert_count": 8, "expert_used_count": 2}
        write_gguf(folder, tmp_path / "model.gguf", Kind.F16, metadata=metadata)
        with pytest.raises(ValueError, match=r"qwen3\.expert_count is 8, which is not supported"):
            resolve(tmp_path / "model.gguf")

    @pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
    def test_llama_with_experts_is_mixtral(
        self, tiny_models, paged_runner, write_gguf, tmp_path, kind
    ):
        folder = tiny_models.write_tiny_model(tmp_path / "model", "Mixtral", sliding_window=None)
        kept = write_gguf(folder, tmp_path / "model.gguf", kind, metadata={"rope.freq_base": 1e6})
        save_file(kept, folder / "model.safetensors")
        expected = load_model(folder, dtype="float32")
        found = load_model(tmp_path / "model.gguf", dtype="float32")
        assert found.config.architecture == "MixtralForCausalLM"
        assert found.config.layers == expected.config.layers
        logits = paged_runner(found).step(PROMPT)
        assert torch.equal(logits, paged_runner(expected).step(PROMPT))

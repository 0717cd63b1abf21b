"""Adapters of peft: files, refusals, and a model's logits with one, against the merged model."""

import json
import os
from pathlib import Path

import nv_kernels as nk
import pytest
import torch
from nv_models import AdapterFiles, AdapterPool, load_model, plan_model
from nv_models.layers.linear import Linear
from safetensors.torch import load_file, save_file

TOKENS = [(37 * i + 11) % 320 for i in range(40)]
CLOSE = 1e-5
FUSED = {
    "Phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "OPT": ("model.decoder.layers.1.self_attn.q_proj", "model.decoder.layers.2.fc1",
            "model.decoder.layers.2.fc2", "model.decoder.layers.0.self_attn.out_proj"),
    "Glm4": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_up_proj", "mlp.down_proj"),
}  # fmt: skip
"""Modules of the architectures whose names are not Llama's."""


def load(model, folder, num_slots=8, max_rank=64, slot=3):
    """A pool beside the model, with an adapter in a slot."""
    pool = AdapterPool(model, num_slots, max_rank)
    has_ends = pool.fill(image := pool.image(), AdapterFiles.open(folder))
    pool.load(slot, image)
    return pool, has_ends


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "name", ["Qwen3", "Qwen2", "Llama", "Phi3", "Glm4", "Gemma2", "Olmo2", "Granite", "OPT"]
)
def test_logits_are_those_of_the_merged_model(tiny_model, adapters, paged_runner, tmp_path, name):
    base = tiny_model(name)
    modules = FUSED.get(name, adapters.LAYER)
    folder = adapters.write_adapter(tmp_path / "adapter", base, modules)
    model = load_model(base, dtype="float32")
    runner = paged_runner(model)
    plain = runner.step(TOKENS)
    _, has_ends = load(model, folder)
    assert not has_ends
    expected = adapters.merged_logits(base, folder, TOKENS)
    assert error(plain, expected) > 1e-2
    runner = paged_runner(model)
    found = torch.cat([runner.step(tokens, 3) for tokens in (TOKENS[:39], TOKENS[39:])])
    assert error(found, expected) < CLOSE
    assert torch.equal(paged_runner(model).step(TOKENS, -1), plain)  # a row without one
    assert torch.equal(paged_runner(model).step(TOKENS, 0), plain)  # an empty slot


Q1 = "model.layers.1.self_attn.q_proj"
KINDS = {
    "rank 1": {"r": 1},
    "rank 64": {"r": 64},
    "rslora": {"r": 16, "use_rslora": True},
    "patterns": {
        "r": 4, "ranks": {Q1: 7}, "alpha_pattern": {Q1: 3, "layers.*.k_proj": 1.5},
    },
    "some layers": {"layers": [1], "modules": ("self_attn.v_proj", "mlp.up_proj")},
    "ends": {"modules": ("self_attn.q_proj", "model.embed_tokens", "lm_head")},
    "bf16": {"dtype": torch.bfloat16},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter(tiny_checkpoint, adapters, paged_runner, tmp_path, kind):
    base, options = tiny_checkpoint(), dict(KINDS[kind])
    modules = options.pop("modules", adapters.LAYER)
    folder = adapters.write_adapter(tmp_path / "adapter", base, modules, **options)
    model = load_model(base, dtype="float32")
    _, has_ends = load(model, folder)
    assert has_ends == (kind == "ends")
    if kind == "patterns":  # the writer's truth knows whole names alone
        config = folder / "adapter_config.json"
        values = json.loads(config.read_text())
        del values["alpha_pattern"]["layers.*.k_proj"]
        for layer in range(2):
            values["alpha_pattern"][f"model.layers.{layer}.self_attn.k_proj"] = 1.5
        config.write_text(json.dumps(values))
    expected = adapters.merged_logits(base, folder, TOKENS)
    assert error(paged_runner(model).step(TOKENS, 3), expected) < CLOSE


def test_a_copy_of_the_base_is_not_read(base_pool, adapters, tmp_path):
    """Peft writes the embedding of the base too, if it has an adapter."""
    base, pool = base_pool
    folder = adapters.write_adapter(tmp_path / "adapter", base, ("lm_head",), r=4)
    file = folder / "adapter_model.safetensors"
    copy = {"base_model.model.lm_head.base_layer.weight": torch.zeros(320, 128)}
    save_file(load_file(file) | copy, file)
    assert len(AdapterFiles.open(folder).matrices(pool.targets, 4)) == 1


def test_a_tied_head_has_an_adapter_of_its_own(tiny_checkpoint, adapters, paged_runner, tmp_path):
    base = tiny_checkpoint()
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    folder = adapters.write_adapter(tmp_path / "adapter", base, ("model.embed_tokens", "lm_head"))
    expected = adapters.merged_logits(base, folder, TOKENS)
    model = load_model(base, dtype="float32", hf_overrides={"tie_word_embeddings": True})
    load(model, folder)
    assert error(paged_runner(model).step(TOKENS, 3), expected) < CLOSE


def test_another_adapter_takes_a_slot_whole(tiny_checkpoint, adapters, paged_runner, tmp_path):
    base = tiny_checkpoint()
    large = adapters.write_adapter(tmp_path / "large", base, r=32)
    small = adapters.write_adapter(tmp_path / "small", base, ("mlp.up_proj",), r=2, seed=1)
    model = load_model(base, dtype="float32")
    pool, _ = load(model, large)
    image = pool.image()
    for folder in (large, small):
        pool.fill(image, AdapterFiles.open(folder))
        pool.load(3, image)
        expected = adapters.merged_logits(base, folder, TOKENS)
        assert error(paged_runner(model).step(TOKENS, 3), expected) < CLOSE
    assert pool.num_bytes == pool.values.numel() * 4


def test_the_bytes_of_a_pool_are_planned(float_checkpoint):
    plan = plan_model(float_checkpoint, dtype="float32")
    pool = AdapterPool(plan.load(), 3, 24, torch.bfloat16)
    assert plan.adapter_bytes(3, 24, torch.bfloat16) == pool.num_bytes == 2 * pool.values.numel()
    per_layer = 32 * (3 * 128 + 512 + 256 + 128 + 2 * 128 + 384 + 192 + 128)  # A and B, rank 32
    ends = 32 * 2 * (320 + 128)
    assert pool.num_bytes == 3 * 2 * (2 * per_layer + ends)


def test_a_name_without_model_is_found(tiny_checkpoint, adapters, tmp_path):
    base = tiny_checkpoint()
    folder = adapters.write_adapter(tmp_path / "adapter", base)
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace("model.layers", "layers", 1): t for name, t in load_file(file).items()}
    assert "base_model.layers.0.mlp.up_proj.lora_A.weight" not in tensors
    save_file({name.replace("base_layers", "base_model.model.layers"): t
               for name, t in tensors.items()}, file)  # fmt: skip
    pool = AdapterPool(load_model(base, dtype="float32"), 1, 8)
    assert len(AdapterFiles.open(folder).matrices(pool.targets, 8)) == 14


def test_a_digest_names_bytes(tiny_checkpoint, adapters, tmp_path):
    base = tiny_checkpoint()
    one, same, other = (
        adapters.write_adapter(tmp_path / name, base, seed=seed)
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    digests = [AdapterFiles.open(each).digest() for each in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    config = same / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 17'))
    assert AdapterFiles.open(same).digest() != digests[0]


CONFIGS = {
    "peft_type is 'LOHA': only LORA": {"peft_type": "LOHA"},
    "use_dora is True.*merge_and_unload": {"use_dora": True},
    "lora_bias is True.*train": {"lora_bias": True},
    "bias is 'all'": {"bias": "all"},
    "init_lora_weights is 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights is 'olora'": {"init_lora_weights": "olora"},
    r"modules_to_save has 'lm_head'": {"modules_to_save": ["score", "lm_head"]},
    "trainable_token_indices is": {"trainable_token_indices": [3]},
    "layer_replication is": {"layer_replication": [[0, 1]]},
    r"modules_to_save is 'score': it must be a list": {"modules_to_save": "score"},
    r"modules_to_save is 5: it must be a list": {"modules_to_save": 5},
    r"use_rslora is 'no': it must be true or false": {"use_rslora": "no"},
    r"kasa_config is \{'x'.{196}, which is not known here: merge": {
        "kasa_config": {"x": "y" * 500}
    },
    "r is 0: it must be a positive integer": {"r": 0},
    "r is True: it must be": {"r": True},
    "lora_alpha is missing": {"lora_alpha": None},
    "lora_alpha is inf: it must be a positive number": {"lora_alpha": float("inf")},
    "lora_alpha is 1000.*: it must be a positive number": {"lora_alpha": 10**400},
    r"rank_pattern\['q'\] is 1.5": {"rank_pattern": {"q": 1.5}},
    r"rank_pattern has the regular expression '\(', which is none": {"rank_pattern": {"(": 1}},
    "alpha_pattern has .* whose match could take for ever": {"alpha_pattern": {"([a-z.]+)+X": 1}},
    "s: the rank of model.layers.0.mlp.down_proj is 8 and max_lora_rank is 4: .*_rank=8$": {},
    r"lora_A.weight has the shape \[8, 128\].*r = 9 it must be \[9, 128\]": {"r": 9},
}


@pytest.fixture(scope="module")
def base_pool(tmp_path_factory, float_checkpoint):
    model = load_model(float_checkpoint, dtype="float32")
    return float_checkpoint, AdapterPool(model, 1, 4)


@pytest.mark.parametrize("message", CONFIGS)
def test_a_config_is_refused(base_pool, adapters, tmp_path, message):
    base, pool = base_pool
    folder = adapters.write_adapter(tmp_path / "adapter", base)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CONFIGS[message]))
    with pytest.raises(ValueError, match=message) as raised:
        AdapterFiles.open(folder).matrices(pool.targets, pool.max_rank)
    assert str(folder) in str(raised.value)


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS = {
    "^/.*: lora_A.weight does not begin with base_model.model.: save the adapter with peft": {
        "lora_A.weight": torch.zeros(4, 128)
    },
    "lora_A.default.weight is the name in a model: save the adapter with peft's": {
        A0.replace("lora_A", "lora_A.default"): torch.zeros(4, 128)
    },
    "base_model.model.x{183} is not a tensor of LoRA: merge": {
        "base_model.model." + "x" * 5000: torch.zeros(1)
    },
    "lora_magnitude_vector is not a tensor of LoRA": {
        A0.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(128)
    },
    "score.weight is a whole module: this model has no such classifier": {
        "base_model.model.score.weight": torch.zeros(2, 128)
    },
    "layers.9.* has no such module": {
        A0.replace("layers.0", "layers.9"): torch.zeros(4, 128),
        A0.replace("layers.0", "layers.9").replace("_A", "_B"): torch.zeros(256, 4),
    },
    "score has an adapter, and this model has no such classifier": {
        "base_model.model.score.lora_A.weight": torch.zeros(4, 128)
    },
    "has A without the other matrix: save the adapter again": {
        A0.replace("q_proj", "o_proj"): torch.zeros(4, 256)
    },
    r"shape \[5, 128\]": {A0: torch.zeros(5, 128)},
    "is I32": {A0: torch.zeros(4, 128, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", TENSORS)
def test_a_tensor_is_refused(base_pool, adapters, tmp_path, message):
    base, pool = base_pool
    modules = ("self_attn.q_proj", "mlp.up_proj")
    folder = adapters.write_adapter(tmp_path / "adapter", base, modules, r=4)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | TENSORS[message], file)
    with pytest.raises(ValueError, match=message):
        AdapterFiles.open(folder).matrices(pool.targets, pool.max_rank)


def test_of_several_problems_two_are_named_and_of_ranks_the_largest(base_pool, adapters, tmp_path):
    base, pool = base_pool
    ranks = {"model.layers.1.mlp.up_proj": 600}
    folder = adapters.write_adapter(tmp_path / "adapter", base, r=8, ranks=ranks)
    with pytest.raises(ValueError, match=r"up_proj is 600 .* 4: it can be 512 at most; merge"):
        AdapterFiles.open(folder).matrices(pool.targets, pool.max_rank)
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace("self_attn", "other"): each for name, each in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"and \d+ more") as raised:
        AdapterFiles.open(folder).matrices(pool.targets, 600)
    assert str(raised.value).count("no such module") == 2


def test_experts_are_refused_by_name(tiny_checkpoint, adapters, tmp_path):
    base = tiny_checkpoint("qwen3_moe", num_experts=4, num_experts_per_tok=2,
                           moe_intermediate_size=32, decoder_sparse_step=2)  # fmt: skip
    pool = AdapterPool(load_model(base, dtype="float32"), 1, 8)
    dense = adapters.write_adapter(tmp_path / "dense", base, ("self_attn.q_proj",))
    assert len(AdapterFiles.open(dense).matrices(pool.targets, 8)) == 2
    sparse = adapters.write_adapter(tmp_path / "sparse", base, ("model.layers.1.mlp.gate",))
    with pytest.raises(ValueError, match="adapters of a mixture's experts or router"):
        AdapterFiles.open(sparse).matrices(pool.targets, 8)


def test_a_scaled_embedding_is_refused(tiny_model, adapters, tmp_path):
    base = tiny_model("Gemma2")
    folder = adapters.write_adapter(tmp_path / "adapter", base, ("model.embed_tokens",))
    pool = AdapterPool(load_model(base, dtype="float32"), 1, 8)
    with pytest.raises(ValueError, match="this architecture multiplies its embedding"):
        AdapterFiles.open(folder).matrices(pool.targets, 8)


def test_broken_files(float_checkpoint, adapters, tmp_path):
    folder = adapters.write_adapter(tmp_path / "adapter", float_checkpoint)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is corrupt or truncated"):
        AdapterFiles.open(folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 4\n")
    with pytest.raises(ValueError, match=r"is a Git LFS pointer.* or download the file$"):
        AdapterFiles.open(folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin and no .*save_pretrained"):
        AdapterFiles.open(folder)
    config.write_text("[]")
    with pytest.raises(ValueError, match="is a JSON list: it must be an object"):
        AdapterFiles.open(folder)
    config.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        AdapterFiles.open(folder)
    config.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json"):
        AdapterFiles.open(folder)
    config.mkdir()
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json is a folder, not a file: gi"):
        AdapterFiles.open(folder)
    config.rmdir()
    config.symlink_to("/nowhere")
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json links to /nowhere, which is"):
        AdapterFiles.open(folder)
    config.unlink()
    adapters.write_adapter(folder.with_name("other"), float_checkpoint)
    (folder.with_name("other") / config.name).rename(config)
    os.mkfifo(file)
    with pytest.raises(FileNotFoundError, match=r"safetensors is a pipe or a device, not a file"):
        AdapterFiles.open(folder)


def test_a_file_that_is_cut_off_while_it_is_read_ends_no_process(base_pool, adapters, tmp_path):
    base, pool = base_pool
    folder = adapters.write_adapter(tmp_path / "adapter", base, r=4)
    files, weights = AdapterFiles.open(folder), folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    name = list(files.shapes)[-1]
    with files.read() as reader:
        assert reader.whole(name).shape == files.shapes[name]
        os.truncate(weights, len(whole) // 2)
        with pytest.raises(ValueError, match="has changed while it was read"):
            reader.whole(name)
    with pytest.raises(ValueError, match="has changed while it was read"):
        pool.fill(pool.image(), files)
    for length in (0, 5, 40):
        os.truncate(weights, length)
        with pytest.raises(ValueError, match="has changed while it was read"):
            files.read()


def test_values_that_are_not_finite_or_changed(base_pool, adapters, tmp_path):
    base, pool = base_pool
    folder = adapters.write_adapter(tmp_path / "adapter", base, r=4)
    files, image = AdapterFiles.open(folder), pool.image()
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[A0][0, 0] = float("inf")
    save_file(tensors, file)
    with pytest.raises(ValueError, match="has changed while it was read"):
        pool.fill(image, files)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        pool.fill(image, AdapterFiles.open(folder))


QUANTIZED = Path(__file__).with_name("quantized")


@pytest.mark.parametrize("name", ["w4", "int8", "fp8_row", "mixed"])
def test_beside_a_quantized_base(name):
    """Each product is the base's, whose bits stay, plus B A x."""
    model = load_model(QUANTIZED / name, dtype="float32")
    pool = AdapterPool(model, 2, 4)
    generator = torch.Generator().manual_seed(0)
    pool.values.copy_(torch.randn(pool.values.shape, generator=generator) * 0.05)
    plan = nk.lora_plan(torch.tensor([1, -1, 0, -1], dtype=torch.int32), 2, 4)
    products = [each for each in model.modules() if isinstance(each, Linear)]
    assert len(products) >= 4
    for each in products:
        x = torch.randn(4, each.shape[1], generator=generator)
        a, b, part_rows = each.lora
        base, found = each.weight.linear(x), each.product(plan).linear(x)
        assert torch.equal(found[[1, 3]], base[[1, 3]])
        for token, slot in ((0, 1), (2, 0)):
            hidden = (a[slot].double() @ x[token].double()).split(b.shape[2])
            parts = zip(b[slot].double().split(part_rows), hidden, strict=True)
            delta = torch.cat([rows @ part for rows, part in parts])
            assert error(found[token], base[token] + delta) < CLOSE
    layer = model.model.layers[0]
    stream = nk.Stream(torch.randn(4, model.config.hidden_size, generator=generator))
    for each in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
        (base, _), (found, _) = (each(stream, layer.before_mlp_norm, p) for p in (None, plan))
        assert torch.equal(found[[1, 3]], base[[1, 3]])
        assert error(found[[0, 2]], base[[0, 2]]) > 1e-3

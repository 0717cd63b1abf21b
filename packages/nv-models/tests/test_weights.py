"""The strict loader: one error that lists everything, and known extras that are not errors."""

import json
import os
import shutil
import signal

import pytest
import torch
from gguf import GGMLQuantizationType
from nv_models import TensorParallel, load_model, plan_model, resolve
from safetensors.torch import load_file, save_file

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def edited(tiny_checkpoint):
    """A function that rewrites the checkpoint's tensors and returns its folder."""

    def edit(change, **options):
        folder = tiny_checkpoint(**options)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


@pytest.fixture
def sharded(tiny_checkpoint):
    """A checkpoint in two files and an index."""
    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, tensors


def test_every_parameter_is_the_files(tiny_checkpoint):
    folder = tiny_checkpoint(attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    model = load_model(folder)
    attention = model.model.layers[1].self_attn
    parts = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    expected = torch.cat([tensors[f"{part}.weight"] for part in parts])
    assert torch.equal(attention.qkv_proj.weight.values, expected)
    expected = torch.cat([tensors[f"{part}.bias"] for part in parts])
    assert torch.equal(attention.qkv_proj.bias, expected)
    expected = torch.cat(
        [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    )
    assert torch.equal(model.model.layers[0].mlp.gate_up_proj.weight.values, expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_one_error_lists_everything(edited):
    def change(tensors):
        del tensors[Q]
        tensors[K] = tensors[K][:-1].clone()
        tensors["model.layers.7.extra"] = torch.zeros(2)

    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(edited(change))
    message = str(error.value)
    assert f"{Q} [256, 128] is missing" in message
    assert f"{K} has shape [127, 128], expected [128, 128]" in message
    assert "model.layers.7.extra [2] is unexpected" in message


def test_f7_a_long_list_of_problems_is_cut(edited):
    def change(tensors):
        tensors |= {f"model.extra.{i}": torch.zeros(2) for i in range(1000)}

    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(edited(change))
    lines = str(error.value).splitlines()
    assert len(lines) == 23
    assert lines[-2].strip() == "and 980 more"


def test_known_extras_are_skipped(edited):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(32)

    assert load_model(edited(change, tie_word_embeddings=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_16_another_head_beside_a_tied_embedding_is_reported_by_one_rank(edited, dtype, rank):
    def copied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def changed(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.1

    def shortened(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()

    def load(change, overrides=None):
        folder = edited(change, name=change.__name__, tie_word_embeddings=True)
        parallel = TensorParallel(rank, 2)
        return load_model(folder, dtype=dtype, parallel=parallel, hf_overrides=overrides)

    load(copied)  # warnings are errors here
    for change in (changed, shortened):
        if rank:
            load(change)
            continue
        with pytest.warns(UserWarning, match=r"lm_head.weight is not the embedding, .* pass hf_o"):
            model = load(change)
        assert torch.equal(rows_of_head(model), model.model.embed_tokens.weight)
    model = load(changed, {"tie_word_embeddings": False})
    assert not torch.equal(rows_of_head(model), model.model.embed_tokens.weight)


def rows_of_head(model):
    """[V, E], however they are laid out."""
    table = model.model.embed_tokens.weight
    one_hot = torch.eye(table.shape[1], dtype=table.dtype)
    return model.lm_head.head.logits(one_hot).T.to(table.dtype)


def test_head_of_an_untied_model_is_wanted(edited):
    with pytest.raises(ValueError, match=r"lm_head.weight \[320, 128\] is missing"):
        load_model(edited(lambda tensors: tensors.pop("lm_head.weight")))


def test_integers_are_not_weights(edited):
    def change(tensors):
        tensors[Q] = tensors[Q].to(torch.int8)

    with pytest.raises(ValueError, match=f"{Q} is int8, expected plain floats"):
        load_model(edited(change))


def test_shards_by_index(sharded):
    folder, tensors = sharded
    model = load_model(folder)
    assert torch.equal(model.lm_head.head.values, tensors["lm_head.weight"])


def test_missing_and_truncated_shards_are_listed_together(sharded):
    folder, _ = sharded
    (folder / "a.safetensors").unlink()
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(data[:-100])
    with pytest.raises(FileNotFoundError) as error:
        load_model(folder)
    assert f"{folder / 'a.safetensors'} is missing" in str(error.value)
    assert f"{folder / 'b.safetensors'} ({len(data) - 100} bytes) is corrupt" in str(error.value)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_other_files_beside_the_model_are_not_read(tiny_checkpoint, name):
    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    save_file({Q: torch.zeros_like(tensors[Q]), "lora": torch.zeros(2)}, folder / name)
    model = load_model(folder)
    assert torch.equal(model.lm_head.head.values, tensors["lm_head.weight"])
    assert model.model.layers[0].self_attn.qkv_proj.weight.values[0].any()


def test_other_files_beside_the_index_are_not_read(sharded):
    folder, _ = sharded
    save_file({Q: torch.zeros(1)}, folder / "consolidated.safetensors")
    assert load_model(folder)


def test_links_that_point_nowhere(tiny_checkpoint, sharded):
    folder, _ = sharded
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to("../blobs/1")
    with pytest.raises(
        FileNotFoundError, match=r"a.safetensors links to ../blobs/1, which is gone"
    ):
        load_model(folder)
    folder = tiny_checkpoint(name="single")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/2")
    with pytest.raises(FileNotFoundError, match=r"which is gone \(a pruned hub cache\?\)") as error:
        load_model(folder)
    assert str(error.value).endswith("download or convert it again")


def test_16_folders_and_links_in_place_of_files(tiny_checkpoint):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is a folder, not a file"):
        load_model(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../blobs/3")
    with pytest.raises(FileNotFoundError, match=r"config.json links to ../blobs/3, which is gone"):
        load_model(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config.json is a folder, not a file; a model"):
        load_model(folder)


PIPES = ["model.safetensors", "model.safetensors.index.json", "config.json", "model.gguf"]


@pytest.fixture
def in_time():
    """Raises an error in a test that waits for a pipe's writer."""

    def interrupt(*_):
        raise TimeoutError("the test waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", PIPES)
def test_16_a_pipe_in_place_of_a_file(tiny_checkpoint, name):
    folder = tiny_checkpoint()
    if name == "model.gguf":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises((FileNotFoundError, ValueError), match=f"{name} is a pipe or a device, not"):
        load_model(folder / name if name == "model.gguf" else folder)
    if name == "model.gguf":
        with pytest.raises(FileNotFoundError, match=r"model.gguf is a pipe or a device, not a fil"):
            load_model(folder)


@pytest.mark.parametrize("data", [b"", b"not safetensors at all", b"\xff" * 64])
def test_corrupt_file(tiny_checkpoint, data):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors .* is corrupt or truncated"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_corrupt_index(sharded, text):
    folder, _ = sharded
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a safetensors index: (it has no|Expecting)"):
        load_model(folder)


def test_folder_without_weights(tiny_checkpoint):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no weights: no \*.safetensors, pytorch_m"):
        load_model(folder)
    for load_format, wanted in (("safetensors", r"\*.safetensors"), ("pt", r"pytorch_model\*.bin")):
        with pytest.raises(FileNotFoundError, match=f"has no weights: no {wanted} in it"):
            load_model(folder, load_format=load_format)


def test_dummy_needs_only_the_config_and_follows_the_seed(tiny_checkpoint):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").unlink()

    def weight(seed):
        model = load_model(folder, load_format="dummy", dtype="bfloat16", seed=seed)
        return model.model.embed_tokens.weight

    first = weight(3)
    assert first.dtype == torch.bfloat16
    assert 0.015 < first.float().std() < 0.025
    assert torch.equal(first, weight(3))
    assert not torch.equal(first, weight(4))


@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_dtype_is_what_was_asked_for(tiny_checkpoint, dtype):
    model = load_model(tiny_checkpoint(), dtype=dtype)
    assert model.config.dtype == torch.float16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_bad_arguments(tiny_checkpoint):
    folder = tiny_checkpoint()
    with pytest.raises(ValueError, match=r"dtype is 'int8': it must be auto, float32, "):
        load_model(folder, dtype="int8")
    with pytest.raises(
        ValueError, match="load_format is 'pickle': it must be one of auto, safetensors"
    ):
        load_model(folder, load_format="pickle")
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide"):
        load_model(folder, parallel=TensorParallel(0, 3))


def test_dtype_comes_from_the_file_where_the_config_is_silent(tiny_checkpoint):
    folder = tiny_checkpoint(dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).config.dtype == torch.bfloat16


@pytest.mark.parametrize("stated", ["foo", "float64", 5])
def test_a_dtype_of_the_config_that_is_none(tiny_checkpoint, stated):
    folder = tiny_checkpoint()
    config = json.loads((folder / "config.json").read_text()) | {"dtype": stated}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json: dtype is {stated!r}: it must be one of"):
        load_model(folder)
    assert load_model(folder, dtype="float32").config.dtype == torch.float32


def test_an_index_comes_before_a_single_file(sharded):
    folder, tensors = sharded
    changed = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    assert torch.equal(load_model(folder).lm_head.head.values, tensors["lm_head.weight"])
    (folder / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a.safetensors is missing"):
        load_model(folder)
    (folder / "b.safetensors").unlink()  # an index of files that were all joined to one
    assert (load_model(folder).lm_head.head.values == 1).all()


def test_a_second_definition_of_a_tensor(tiny_checkpoint):
    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({Q: tensors[Q]}, folder / "b.safetensors")
    with pytest.raises(ValueError, match=rf"{Q} in .*b.safetensors is also in another file"):
        load_model(folder)


def test_a_stored_head_is_skipped_only_where_it_is_tied(edited):
    def change(tensors):
        tensors["lm_head.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], 3.0)

    model = load_model(edited(change, tie_word_embeddings=False))
    assert (model.lm_head.head.values == 3.0).all()


POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "m.gguf"],
)
def test_a_git_lfs_pointer_is_named(tiny_checkpoint, name):
    folder = tiny_checkpoint()
    (folder / name).write_text(POINTER)
    path = folder / name if name.endswith(".gguf") else folder
    with pytest.raises(ValueError, match=rf"{name} .*is a Git LFS pointer.* `git lfs pull`"):
        load_model(path)


def test_a_git_lfs_pointer_in_place_of_an_index_or_a_shard(sharded):
    folder, _ = sharded
    (folder / "b.safetensors").write_text(POINTER)
    with pytest.raises(ValueError, match=r"b.safetensors .*is a Git LFS pointer"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text(POINTER)
    with pytest.raises(ValueError, match=r"index.json is a Git LFS pointer"):
        load_model(folder)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_s_defaults_change_nothing(tiny_checkpoint, paged_runner, device, dtype):
    folder = tiny_checkpoint()
    expected = load_model(folder)
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        model = load_model(folder)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(parameter, wanted[name]), name
    assert all(
        torch.equal(table, expected.model.cos_sin[rope])
        for rope, table in model.model.cos_sin.items()
    )
    assert torch.equal(paged_runner(model).step([5, 6]), paged_runner(expected).step([5, 6]))


@pytest.mark.parametrize("load_format", ["safetensors", "pt", "gguf"])
def test_the_shapes_are_made_once(tiny_checkpoint, write_gguf, tmp_path, load_format):
    folder = tiny_checkpoint()
    if load_format == "pt":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    if load_format == "gguf":
        write_gguf(folder, tmp_path / "model.gguf", GGMLQuantizationType.F32)
        folder = resolve(tmp_path / "model.gguf")
    checkpoint = plan_model(folder, load_format=load_format).checkpoint
    parts = {part for part, _ in checkpoint._found.values()}
    assert checkpoint.shapes[Q] == (256, 128)
    for each in (checkpoint, *parts):
        assert each.shapes is each.shapes


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.norm.weight", {}),
        ("model.embed_tokens.weight", {}),
        ("lm_head.weight", {}),
        ("model.embed_tokens.weight", TIED),
    ],
)
def test_16_an_end_of_zeros_is_refused(edited, name, options):
    folder = edited(lambda tensors: tensors[name].zero_(), **options)
    with pytest.raises(
        ValueError, match=f"{folder}: all zeros, .* are {name}; download or convert"
    ):
        load_model(folder)
    load_model(folder, load_format="dummy")


def test_16_zeros_that_a_checkpoint_may_hold(edited, tiny_model, tmp_path):
    def all_but_one(tensors):
        tensors["lm_head.weight"][:, :-1].zero_()

    load_model(edited(all_but_one))
    folder = shutil.copytree(tiny_model("Gemma3"), tmp_path / "gemma")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].zero_()  # it multiplies by 1 + weight
    save_file(tensors, folder / "model.safetensors")
    load_model(folder)


@pytest.mark.parametrize("name", ["input_layernorm.weight", "self_attn.o_proj.weight"])
def test_16_zeros_within_the_layers_are_warned_of(edited, name):
    folder = edited(lambda tensors: tensors[f"model.layers.0.{name}"].zero_())
    sentence = (
        f"{folder}: all zeros, .* are model.layers.0.{name}; download or convert it again, un"
    )
    with pytest.warns(UserWarning, match=sentence):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("model.layers.0.self_attn.o_proj.weight", 0.5, 1),
        ("model.layers.1.mlp.down_proj.weight", 0.25, 0.5),
        ("model.layers.1.mlp.gate_proj.weight", 0.99, 1),
        ("model.embed_tokens.weight", 0.4, 1),
    ],
)
def test_16_a_matrix_that_is_zeros_in_part_is_warned_of(edited, name, first, last):
    def cut(tensors):
        rows = len(tensors[name])
        start, end = int(rows * first), int(rows * last)
        tensors[name][start:end].zero_()
        counts.append(f"{end - start} of {rows} rows of {name}")

    counts = []
    folder = edited(cut)
    with pytest.warns(UserWarning, match=f"{folder}: all zeros, .*; download or") as caught:
        load_model(folder)
    assert [counts[0] in str(each.message) for each in caught] == [True]


def test_16_a_table_may_end_in_rows_of_zeros(edited):
    """The ids from there on have no token, and so no training."""

    def padded(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][-len(tensors[name]) // 3 :].zero_()

    load_model(edited(padded))


def test_16_the_zeros_at_the_end_of_a_gguf_file(tiny_checkpoint, write_gguf, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint(), file, GGMLQuantizationType.F32)
    data = file.read_bytes()
    file.write_bytes(data[:-600] + bytes(600))
    with pytest.raises(
        ValueError, match=r"model.gguf: all zeros, .* model.norm.weight \(output_no"
    ):
        load_model(file)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F64, GGMLQuantizationType.I32])
def test_16_a_gguf_type_that_is_not_read(tiny_checkpoint, write_gguf, tmp_path, kind):
    file = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint(), file, GGMLQuantizationType.F32)
    name = b"blk.0.attn_q.weight"
    data = bytearray(file.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions, and two
    assert data[place : place + 4] == bytes(4)  # F32
    data[place] = kind
    file.write_bytes(data)
    sentence = f"blk.0.attn_q.weight in {file} has the type {kind.name}, which is not read"
    with pytest.raises(ValueError, match=sentence):
        load_model(file)

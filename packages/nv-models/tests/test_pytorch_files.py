"""Weights from `pytorch_model.bin`: the same model as from safetensors, and no code is run."""

import json
import os

import pytest
import torch
from nv_models import hub, load_model, resolve
from safetensors.torch import load_file

BIN = "pytorch_model.bin"


@pytest.fixture
def converted(tiny_checkpoint):
    """A function that writes the safetensors file anew as PyTorch's; gives folder and tensors."""

    def convert(rename=lambda name: name, kind="qwen3", **options):
        folder = tiny_checkpoint(kind, attention_bias=True)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({rename(name): each for name, each in tensors.items()}, folder / BIN, **options)
        return folder, tensors

    return convert


def assert_filled(model, tensors):
    qkv = model.model.layers[1].self_attn.qkv_proj
    for part, name in enumerate("qkv"):
        rows = slice(*((0, 256), (256, 384), (384, 512))[part])
        expected = tensors[f"model.layers.1.self_attn.{name}_proj.weight"]
        assert torch.equal(qkv.weight.values[rows], expected)
        assert torch.equal(qkv.bias[rows], tensors[f"model.layers.1.self_attn.{name}_proj.bias"])
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(model.lm_head.head.values, tensors["lm_head.weight"])


@pytest.mark.parametrize("load_format", ["auto", "pt"])
@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "before 1.6"])
def test_every_parameter_is_the_files(converted, load_format, is_new):
    folder, tensors = converted(_use_new_zipfile_serialization=is_new)
    assert_filled(load_model(folder, load_format=load_format), tensors)


def test_names_without_the_body_in_front(converted):
    folder, tensors = converted(lambda name: name.removeprefix("model."))
    assert_filled(load_model(folder), tensors)


def test_shards_by_index(converted):
    folder, tensors = converted()
    (folder / BIN).unlink()
    names = sorted(tensors)
    files = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, part in files.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "training_args.bin").write_bytes(b"is not read")
    assert_filled(load_model(folder), tensors)
    (folder / "pytorch_model-2.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-2.bin is missing, though pytorch_model.b"):
        load_model(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not a PyTorch index"):
        load_model(folder)


def test_safetensors_come_first(converted, tiny_checkpoint):
    folder, _ = converted()
    other = tiny_checkpoint(name="other", attention_bias=True, seed=1)
    data = (other / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data)
    assert_filled(load_model(folder), load_file(folder / "model.safetensors"))


class RunsCode:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_file_runs_no_code(converted, tmp_path):
    folder, tensors = converted()
    torch.save({**tensors, "more": RunsCode(tmp_path / "ran")}, folder / BIN)
    with pytest.raises(ValueError, match=r"pytorch_model.bin .* holds more than tensors"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"PK\x03\x04" + b"\xff" * 64, None])
def test_corrupt_file(converted, data):
    folder, _ = converted()
    (folder / BIN).write_bytes((folder / BIN).read_bytes()[:-50] if data is None else data)
    with pytest.raises(ValueError, match=r"pytorch_model.bin \(\d+ bytes\) is corrupt, or"):
        load_model(folder)


def test_a_pointer_of_git_lfs(converted):
    folder, _ = converted()
    (folder / BIN).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=r"pytorch_model.bin .* is a Git LFS pointer"):
        load_model(folder)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: list(tensors.values()), "holds a list, not tensors by name"),
        (lambda tensors: {**tensors, "step": 3}, "step in .* is int, not plain floats"),
        (lambda tensors: dict(enumerate(tensors.values())), "0 in .* is not the name of a tensor"),
        (lambda tensors: {**tensors, "q": torch.zeros(2, device="meta")}, "q in .* on meta, not p"),
        (lambda tensors: {**tensors, "q": torch.zeros(2).to_sparse()}, "q in .* is torch.sparse_"),
        (lambda tensors: {**tensors, "q": torch.zeros(2).int()}, r"q in .* is torch.int32, not p"),
    ],
)
def test_other_contents(converted, change, message):
    folder, tensors = converted()
    torch.save(change(tensors), folder / BIN)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", BIN], ["*.safetensors"]),
        ([BIN], ["*.safetensors", "pytorch_model*.bin"]),
        ([], ["*.safetensors", "pytorch_model*.bin"]),
    ],
)
def test_a_hub_is_asked_for_pytorch_files_if_it_has_no_safetensors(
    monkeypatch, tmp_path, weights, fetched
):
    asked = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        assert "*_Dense/pytorch_model.bin" in allow_patterns
        asked.append(allow_patterns[-1])
        for file in weights:
            if (tmp_path / file).match(allow_patterns[-1]):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert resolve("org/name") == tmp_path
    assert asked == fetched

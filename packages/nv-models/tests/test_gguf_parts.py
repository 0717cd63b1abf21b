"""GGUF models in parts, as llama.cpp's gguf-split writes them."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from nv_models import load_model, resolve
from nv_models.checkpoint.gguf.parts import part_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def split(file, folder, count, changes=None):
    """Cut a file into parts; `changes` are the metadata of a part, by its number from 0."""
    folder.mkdir(exist_ok=True)
    reader = GGUFReader(file)
    files = []
    for number in range(count):
        part = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        writer = GGUFWriter(part, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind, *inner = field.types
                    sub = inner[-1] if inner else None
                    writer.add_key_value(field.name, field.contents(), kind, sub)
        values = {"split.no": number, "split.count": count}
        values |= {"split.tensors.count": len(reader.tensors)} | (changes or {}).get(number, {})
        for key, value in values.items():
            writer.add_uint32(key, value)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(part)
    return files


@pytest.fixture
def whole(tiny_checkpoint, write_gguf, tmp_path):
    """A model in one file."""
    write_gguf(tiny_checkpoint("llama"), tmp_path / "w.gguf", GGMLQuantizationType.Q8_0)
    return tmp_path / "w.gguf"


def test_b16_any_part_gives_the_whole_model(whole, tmp_path):
    files = split(whole, tmp_path / "parts", 3)
    expected = dict(load_model(whole).named_parameters())
    folder = resolve(files[0])
    assert all(resolve(file) == folder for file in files)
    for name, parameter in load_model(files[1]).named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_b16_links_as_in_the_hub_s_cache_keep_their_names(whole, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(split(whole, tmp_path / "parts", 2)):
        blob = file.rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / file.name).symlink_to(blob)
    assert load_model(tmp_path / "snapshot" / "m-00002-of-00002.gguf")


def test_f7_a_long_list_of_parts_is_cut(tmp_path):
    file = tmp_path / "m-00001-of-65535.gguf"
    file.touch()
    expected = "not m-00002-of-65535.gguf, m-00003-of-65535.gguf, m-00004-of-65535.gguf, and 65531 "
    with pytest.raises(FileNotFoundError, match=expected):
        part_files(file)


def test_b16_a_part_that_is_not_there_is_named(whole, tmp_path):
    first, second = split(whole, tmp_path / "parts", 2)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is not m-00002-of-00002.gguf: put all"):
        resolve(first)
    first.rename(second)
    with pytest.raises(FileNotFoundError, match=r"part 2 of 2, .* not m-00001-of-00002.gguf"):
        resolve(second)


def test_b16_a_part_that_goes_later_is_named(whole, tmp_path):
    files = split(whole, tmp_path / "parts", 2)
    folder = resolve(files[0])
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.gguf"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"split.no": 0}}, "split.no is 0, and by the file's name it is 1"),
        ({0: {"split.count": 3}}, "split.count is 3, and by the file's name it is 2"),
        ({0: {"split.tensors.count": 99}}, "split.tensors.count is 99, but the 2 parts hold 21"),
    ],
)
def test_b16_parts_that_do_not_belong_together(whole, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(split(whole, tmp_path / "parts", 2, changes)[0])


def test_b16_a_part_under_another_name(whole, tmp_path):
    file = split(whole, tmp_path / "parts", 2)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"split.count is 2, .* give the parts of a model their"):
        resolve(file)


def test_b16_a_folder_of_parts_with_its_own_config(whole, tmp_path):
    parts = tmp_path / "parts"
    split(whole, parts, 2)
    with pytest.raises(ValueError, match=r"has no config.json: give the GGUF file itself"):
        resolve(parts)
    (parts / "config.json").write_bytes((resolve(whole) / "config.json").read_bytes())
    assert load_model(parts)


def test_a_tensor_in_two_parts(whole, tmp_path):
    first, second = split(whole, tmp_path / "parts", 2)
    changed = {0: {"split.no": 1}}
    again = split(whole, tmp_path / "again", 2, changed)[0]
    second.write_bytes(again.read_bytes())
    with pytest.raises(ValueError, match="is also in another part"):
        resolve(first)

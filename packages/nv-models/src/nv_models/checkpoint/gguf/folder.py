"""The folder that a GGUF file becomes, in the user's cache.

Owns: its name, its contents (config.json, the tokenizer's files, the link `model.gguf`), and that
it appears whole or not at all.
Never: copies a weight.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from nv_models.checkpoint.gguf import require_extra
from nv_models.checkpoint.gguf.header import read_header

FORMAT = 3  # raise it when the contents change, and old folders are left alone
LINK = "model.gguf"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", LINK)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/nv/gguf`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nv" / "gguf"


def gguf_folder(file: Path) -> Path:
    """The cache folder of a file; the same as long as path, size and time of the file are.

    Raises:
        ValueError: not a GGUF file, or one of a model that is not supported.
    """
    file = file.resolve()
    status = file.stat()
    identity = f"{FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    folder = cache_root() / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        write_folder(file, draft)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError:
        if not is_whole(folder):  # else another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether nobody has taken a file out of it."""
    return all((folder / name).exists() for name in FILES)


def write_folder(file: Path, folder: Path) -> None:
    """Everything that the metadata can say, and a link to the rest."""
    require_extra()
    # Only now: transformers' tokenizers cost seconds, and a folder is written once.
    from nv_models.checkpoint.gguf.metadata import config_json  # noqa: PLC0415
    from nv_models.checkpoint.gguf.tokenizer import build_tokenizer  # noqa: PLC0415

    header = read_header(file)
    config = config_json(header)
    tokenizer = build_tokenizer(header, config["max_position_embeddings"])
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # so that FILES are all
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / LINK).symlink_to(file)

"""The folder that a GGUF file becomes, in the user's cache.

Owns its name, its contents (config.json, the tokenizer's files, a link to each part of the model,
and a record of where they come from), and that it appears whole or not at all. Never copies a
weight.
"""

import hashlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import nv_kernels as nk

from nv_models.checkpoint.gguf import require_extra
from nv_models.checkpoint.gguf.header import read_header
from nv_models.checkpoint.gguf.keys import naming_keys
from nv_models.checkpoint.gguf.parts import model_name, part_files
from nv_models.fields import read_json
from nv_models.rope import RopeConfig
from nv_models.turns import TOKENIZERS

FORMAT = 7  # raise it when the contents change, and old folders are left alone
RECORD = "from_gguf.json"
"""The file that the folder was made of, and what is to be warned of at each load."""
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", RECORD)


def gguf_folder(file: Path) -> Path:
    """The cache folder of a file; the same as long as paths, sizes and times of its parts are.

    Raises:
        FileNotFoundError: a part of the model does not lie beside the file.
        ValueError: not a GGUF file, or one of a model that is not supported.
        OSError: the cache folder cannot be written.

    Warns:
        UserWarning: the vocabulary or a size is odd, and the model runs.
    """
    files = [each.absolute() for each in part_files(file)]
    folder = nk.cache_path("gguf", f"{model_name(file)}-{fingerprint(files)}")
    if not is_whole(folder, len(files)):
        try:
            write_whole(files, folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise OSError(
                f"the folder {folder} cannot be written ({error.strerror or error}): make room or "
                "give the right to write, or set XDG_CACHE_HOME to another folder"
            ) from error
    for sentence in read_json(folder / RECORD)["warnings"]:
        warnings.warn(sentence, stacklevel=3)
    return folder


def source_of(folder: Path) -> Path:
    """The GGUF file that a folder was made of; of any other folder, the folder itself."""
    record = folder / RECORD
    return Path(read_json(record)["file"]) if record.exists() else folder


def fingerprint(files: list[Path]) -> str:
    """Names a model's files as they are now."""
    states = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return hashlib.sha256(f"{FORMAT} {states}".encode()).hexdigest()[:16]


def links(count: int) -> list[str]:
    """The names of the links to a model's parts."""
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def is_whole(folder: Path, count: int) -> bool:
    """Whether every file is there; an empty one is what a power cut leaves of it."""
    files = [folder / name for name in (*FILES, *links(count))]
    return all(file.exists() and file.stat().st_size for file in files)


def write_whole(files: list[Path], folder: Path) -> None:
    """Write the folder under another name, then move it to its own."""
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        write_folder(files, draft)
        if folder.exists() and not is_whole(folder, len(files)):
            shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError:
        if not is_whole(folder, len(files)):  # else another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_folder(files: list[Path], folder: Path) -> None:
    """Write files of all that the metadata holds, and links to the rest."""
    require_extra()
    header = read_header(files[0])
    with TOKENIZERS:
        # Only now: transformers' tokenizers cost seconds, and a folder is written once.
        from nv_models.checkpoint.gguf.metadata import config_json  # noqa: PLC0415
        from nv_models.checkpoint.gguf.tokenizer import build_tokenizer  # noqa: PLC0415
        from nv_models.checkpoint.gguf.vocabulary import doubts  # noqa: PLC0415

        with naming_keys(header.file, header.architecture):
            config = config_json(header)
            rope = RopeConfig.from_parameters(config["rope_parameters"])
        tokenizer = build_tokenizer(header, rope.reach(config["max_position_embeddings"]))
        tokenizer.save_pretrained(folder, save_jinja_files=False)  # so that FILES are all
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    record = {"file": str(files[0]), "warnings": doubts(header, config["vocab_size"])}
    (folder / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
    for name, file in zip(links(len(files)), files, strict=True):
        (folder / name).symlink_to(file)

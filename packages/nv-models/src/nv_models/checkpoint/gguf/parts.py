"""The files of a GGUF model that was cut into parts.

Owns their names, `NAME-00001-of-00003.gguf`, as llama.cpp's gguf-split gives them. Never opens a
file.
"""

import re
from pathlib import Path

from nv_models.listing import first_few

PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MOST = 65535
"""What split.count is kept in has 16 bits."""


def part_files(file: Path) -> list[Path]:
    """All parts of a file's model, in order; a file whose name is not a part's is the only one.

    Raises:
        FileNotFoundError: parts do not lie beside `file`; the message names the first of them.
        ValueError: a number that no part has.
    """
    match = PART.fullmatch(file.name)
    if not match:
        return [file]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MOST:
        raise ValueError(
            f"{file} cannot be part {number} of {count}: parts are numbered from 00001 to their "
            f"count, {MOST} at most"
        )
    suffix = file.suffix
    files = [
        file.with_name(f"{match['model']}-{each:05}-of-{count:05}{suffix}")
        for each in range(1, count + 1)
    ]
    missing = [each.name for each in files if not each.exists()]
    if missing:
        raise FileNotFoundError(
            f"{file} is part {number} of {count}, and beside it in {file.parent} there is not "
            f"{', '.join(first_few(missing))}: put all parts into one folder"
        )
    return files


def model_name(file: Path) -> str:
    """A file's name without suffix and number of the part."""
    match = PART.fullmatch(file.name)
    return match["model"] if match else file.stem

"""Docstrings, comments, errors and documents use plain words: these phrases are not among them."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "benchmarks",
    "packages/nv-cache/src",
    "packages/nv-cache/tests",
    "packages/nv-engine/src",
    "packages/nv-kernels/src",
    "packages/nv-kernels/tests",
    "packages/nv-models/src",
    "packages/nv-models/tests",
)
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "packages/nv-cache/README.md",
    "packages/nv-kernels/README.md",
    "packages/nv-models/README.md",
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")),
)
SUFFIXES = {".py", ".h", ".cpp"}

COUNTED = (
    "tokens|bytes|FLOPs|blocks|heads|elements|rows|columns|keys|queries|registers|programs?|words"
    "|pieces|seconds|milliseconds|microseconds|query|row|once"
)
UNIT = (
    "second|block|kv head|row|token|thread|program|launch|multiprocessor|step|sequence|slot|layer"
    "|machine|warp|load|request|rank|piece|tile|group"
)
# A phrase, and the words to write instead.
PHRASES = {
    rf"\b(?:{COUNTED}) an? (?:{UNIT})\b(?! (?:has|holds|may|is|of|takes|needs|reads)\b)": "per",
    r"(?<!\b[Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|wider\b)": "is not a",
    r"\bbehind\b": "after",
    r"\b(?:nobody|somebody|everybody|anybody|whoever)\b": "a noun",
    r'"""(?:Who|What|Whether or) \w+ ': "a noun as the subject",
    r"\b(?:told|said)\b": "returned, reported, given",
    r"\b(?:says|say) (?:so|why|what|which|how|whether|not)\b": "returns, reports, raises",
    r"\bto be had\b": "available",
    r"\b(?:is|are) out\b(?! of\b)": "is in flight",
    r"\bthe kernel ahead\b": "the previous kernel",
    r"\bPAGE\b": "BLOCK_SIZE",
    r"\bLet (?:a|each|program|every) \w+": "Each program copies",
    r'"""(?:Give|Say) ': "Return",
}


def texts() -> dict[str, str]:
    """Return each file's text on one line, without the marks that begin a comment's lines."""
    paths = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return {
        str(path.relative_to(ROOT)): re.sub(
            r"\s+(?:(?:#|//) )?", " ", path.read_text(encoding="utf-8")
        )
        for path in sorted(paths)
    }


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_not_used(phrase: str) -> None:
    found = [
        f"{name}: …{text[max(hit.start() - 40, 0) : hit.end() + 40]}…"
        for name, text in texts().items()
        for hit in re.finditer(phrase, text)
    ]
    assert not found, "\n".join([f"write: {PHRASES[phrase]}", *found])


def test_a_class_of_the_lower_packages_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT / "packages")))
    lower = ("nv-cache", "nv-kernels")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not [found for found in twice.values() if any(path.startswith(lower) for path in found)]

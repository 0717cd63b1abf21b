"""Docstrings, comments, errors and documents use plain words: these phrases are not among them."""

import ast
import re
import tokenize
from collections import defaultdict
from functools import cache
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
PROSE_FOLDERS = (
    "packages/nv-api/src", "packages/nv-api/tests", "packages/nv-engine/tests", "tests"
)  # fmt: skip
"""Here comments and strings are searched alone: `nv_api.said` is a package, `said` a variable."""
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("packages/*/README.md")),
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")),
)
SUFFIXES = {".py", ".h", ".cpp", ".json"}

COUNTED = (
    "tokens|bytes|FLOPs|blocks|heads|elements|rows|columns|keys|queries|registers|programs?|words"
    "|pieces|seconds|milliseconds|microseconds|query|row|once|ms|us|µs|s|requests|prompts|steps|cards"
    "|nodes|launches|copies|lines|graphs|entries"
)
UNIT = (
    "second|block|kv head|row|token|thread|program|launch|multiprocessor|step|sequence|slot|layer"
    "|machine|warp|load|request|rank|piece|tile|group|minute|hour|replica|card|node|batch|file|page"
)
# A phrase, and the words to write instead.
PHRASES = {
    rf"\b(?:{COUNTED}) an? (?:{UNIT})\b(?! (?:has|holds|may|is|of|takes|needs|reads)\b)": "per",
    r"\b(?:one|once|entry|entries|of them) an? (?:step|shape|slot|row)\b": "per",
    r"(?<!\b[Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|wider\b)": "is not a",
    r"\bbehind\b": "after",
    r"\b(?:nobody|somebody|everybody|anybody|whoever)\b": "a noun",
    r'"""(?:Who|What|Whether or) \w+ ': "a noun as the subject",
    r"(?<!nv_api[./])\b(?:told|said)\b": "returned, reported, given",
    r"\b\w+: who\b|\b(?:those|one) who\b": "a noun",
    r"\b(?:says|say) (?:so|why|what|which|how|whether|not)\b": "returns, reports, raises",
    r"\bto be had\b": "available",
    r"\b(?:is|are|was|were|steps?) out\b(?! of\b)": "is in flight",
    r"\bthe kernel ahead\b": "the previous kernel",
    r"\bPAGE\b": "BLOCK_SIZE",
    r"\bLet (?:a|each|program|every) \w+": "Each program copies",
    r'"""(?:Give|Say) ': "Return",
}
WORDS_OF_NAMES = {
    "anybody", "behind", "everybody", "nobody", "said", "say", "says", "somebody", "told", "who"
}  # fmt: skip
"""Words that the name of a test does not have."""


def prose(path: Path) -> str:
    """Return the comments and strings of a Python file."""
    in_fstring = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # from Python 3.12 on
    kinds = {tokenize.COMMENT, tokenize.STRING, in_fstring}
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        return "\n".join(token.string for token in tokens if token.type in kinds)


@cache
def texts() -> dict[str, str]:
    """Return each file's text on one line, without the marks that begin a comment's lines."""
    whole = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        whole += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found = {path: path.read_text(encoding="utf-8") for path in whole}
    for folder in PROSE_FOLDERS:
        found |= {path: prose(path) for path in (ROOT / folder).rglob("*.py")}
    del found[Path(__file__)]  # it has the phrases
    return {
        str(path.relative_to(ROOT)): re.sub(r"\s+(?:(?:#|//) )?", " ", text)
        for path, text in sorted(found.items())
    }


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_not_used(phrase: str) -> None:
    found = [
        f"{name}: …{text[max(hit.start() - 40, 0) : hit.end() + 40]}…"
        for name, text in texts().items()
        for hit in re.finditer(phrase, text)
    ]
    assert not found, "\n".join([f"write: {PHRASES[phrase]}", *found])


def test_the_names_of_tests_use_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "packages/*/tests")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        if not WORDS_OF_NAMES.isdisjoint(name.split("_"))
    ]
    assert not found, "\n".join(found)


def test_a_class_of_the_lower_packages_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT / "packages")))
    lower = ("nv-cache", "nv-kernels", "nv-engine/src/nv_engine/batch.py")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not [found for found in twice.values() if any(path.startswith(lower) for path in found)]

"""Determinism is one value, `nk.arithmetic`, and a layer runs as it was loaded."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
FLAGS = ("determin", "invariant")
ALLOWED = (
    "nv-engine/src/nv_engine/config.py",  # the user's option
    # Of a plan that all layers of a step read: it sets sizes, and every body is the same.
    "nv-kernels/src/nv_kernels/linear/lora/",
    "nv-engine/src/nv_engine/device/adapters.py",
)
STEPS_BEFORE_FORWARD = {"prepared", "gather", "_own"}
"""Names of the steps that once moved a layer's tensors elsewhere at its first call."""


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGES / package / "src").rglob("*.py")):
        yield str(path.relative_to(PACKAGES)), ast.parse(path.read_text(encoding="utf-8"))


def flags(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Parameters and fields that are a bool and whose name is of determinism."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        else:
            continue
        is_bool = annotation is not None and "bool" in ast.unparse(annotation)
        if is_bool and any(part in name for part in FLAGS):
            yield node.lineno, name


@pytest.mark.parametrize("package", ["nv-kernels", "nv-models", "nv-engine"])
def test_no_boolean_picks_the_arithmetic(package: str) -> None:
    found = [
        f"{path}:{line}: {name}"
        for path, tree in sources(package)
        if not path.startswith(ALLOWED)
        for line, name in flags(tree)
    ]
    assert found == []


def test_the_option_is_found() -> None:
    trees = dict(sources("nv-engine"))
    assert [name for _, name in flags(trees[ALLOWED[0]])] == ["deterministic"]


def test_a_layer_runs_as_it_was_loaded() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources("nv-models")
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef) and node.name in STEPS_BEFORE_FORWARD)
        or (isinstance(node, ast.Attribute) and node.attr in STEPS_BEFORE_FORWARD)
    ]
    assert found == []

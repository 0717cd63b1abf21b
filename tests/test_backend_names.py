"""Only nv-kernels compares the names of attention backends and the dtypes of KV caches."""

import ast
from pathlib import Path

import nv_api
import nv_engine
import nv_models
import pytest
from nv_kernels.attention.select import BACKENDS

KV_DTYPES = {"float8_e4m3fn", "float8_e5m2"}


def is_name(node):
    """Whether an operand of a comparison names a backend or a dtype of fp8."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_name, node.elts))
    if isinstance(node, ast.Attribute):
        return node.attr in KV_DTYPES or (node.attr == "name" and "backend" in ast.unparse(node))
    return isinstance(node, ast.Constant) and node.value in NAMES


NAMES = {*BACKENDS, *KV_DTYPES} - {"cpu"}  # "cpu" is a device as well


@pytest.mark.parametrize("package", [nv_engine, nv_models, nv_api])
def test_a_backends_name_or_a_kv_dtype_is_not_compared(package):
    folder = Path(package.__file__).parent
    found = [
        f"{path.relative_to(folder)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and any(map(is_name, [node.left, *node.comparators]))
    ]
    assert found == []

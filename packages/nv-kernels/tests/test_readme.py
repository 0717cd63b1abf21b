"""The README's block runs."""

import re
from pathlib import Path

import nv_kernels as nk

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_block_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert "torch.Size([4, 8, 64])" in capsys.readouterr().out


def test_every_name_is_in_the_table():
    table = README[README.index("| name |") :]
    assert [name for name in nk.__all__ if f"`{name}" not in table] == []

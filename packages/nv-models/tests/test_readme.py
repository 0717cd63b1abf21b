"""The README's block runs, and its table is complete."""

import re
from pathlib import Path

import nv_models

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_block_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert "torch.Size([3, 320])" in capsys.readouterr().out


def test_every_name_is_in_the_table():
    table = README[README.index("| name |") :]
    assert [name for name in nv_models.__all__ if f"`{name}" not in table] == []

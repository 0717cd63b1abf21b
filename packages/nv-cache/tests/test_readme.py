import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_block_runs(capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "copy 32 tokens of block 1 into block 2\n"

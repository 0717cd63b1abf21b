import re
from pathlib import Path

import nv_api.start


def test_the_readme_blocks_run(checkpoint, monkeypatch, capsys):
    resolve = nv_api.start.resolve

    def tiny(model, revision=None):
        return resolve(checkpoint if model == "demo" else model, revision)

    monkeypatch.setattr(nv_api.start, "resolve", tiny)
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    lines = capsys.readouterr().out
    assert len(blocks) == 2
    assert "Once upon a time ->" in lines
    assert "Rain is =>" in lines
    assert "Snow is =>" in lines
    assert re.search("^4 ", lines, re.MULTILINE)

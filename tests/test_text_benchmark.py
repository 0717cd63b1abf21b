"""benchmarks/text.py makes the text that it times, and no stop string of its cases ends it."""

from functools import partial
from pathlib import Path

import pytest
from nv_engine import SequenceUpdate

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_case_reads_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import text  # noqa: PLC0415  # found by the line above

    token_ids, pieces = text.tokens(500)
    updates = [SequenceUpdate(0, 0, (token,), None, None, 0, 0.0) for token in token_ids]
    whole = b"".join(pieces[token] for token in token_ids).decode()
    assert len(set(token_ids)) > 50
    for stops in text.STOPS.values():
        output = text.run(updates, pieces, stops).output().outputs[0]
        held = whole.removeprefix(output.text)
        assert output.text + held == whole
        assert any(stop.startswith(held) for stop in stops or ("",))
        assert text.us_per_token(partial(text.stream, updates, pieces, stops), 500) > 0

"""Generates with nothing but the installed wheels, on a checkpoint made here."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import nv_api
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make

assert "site-packages" in nv_api.__file__, nv_api.__file__

with tempfile.TemporaryDirectory() as folder:
    with LLM(str(make(Path(folder)))) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(["hello", "world"], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [8, 8]
    print("generated", [output["text"] for output in outputs])

"""A CUDA context that dies on a card: in a process of its own, which ends by itself."""

import subprocess
import sys

import pytest

DIE = """
import sys
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

is_eager, sizes = sys.argv[2] == "eager", {"max_model_len": 64, "num_kvcache_blocks": 16}
config = EngineConfig(model=sys.argv[1], enforce_eager=is_eager, **sizes)
engine = Engine(config)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ids = [engine.add(EngineRequest([5, 6, 7], params)) for _ in range(3)]
for _ in range(3):
    engine.step()
table = torch.arange(8, device="cuda")
table[torch.full((4096,), 2**40, device="cuda")]  # PyTorch's assert of an index
reasons = {}
while engine.has_unfinished:
    for update in engine.step().updates:
        if update.finish_reason:
            reasons[update.request_id] = update.finish_reason, update.stop_reason
assert len(reasons) == 3, reasons
((reason, sentence),) = set(reasons.values())
assert reason == "error" and "the CUDA context of this process is lost" in sentence, sentence
for call in (lambda: engine.add(EngineRequest([5], params)), engine.step):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == sentence
    else:
        raise AssertionError("it was not refused")
engine.close()
print("ended well")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_dead_context_is_reported_and_the_process_ends_by_itself(checkpoint, mode):
    command = [sys.executable, "-c", DIE, str(checkpoint), mode]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, "ended well" in ended.stdout) == (0, True), ended.stderr[-3000:]

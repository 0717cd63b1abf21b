"""Peak host memory while loading, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

MIB = 1 << 20
LOAD_AND_WATCH = """
import json, sys, threading, time
from dataclasses import replace
import nv_kernels as nk
import torch
from nv_models import TensorParallel, load_model, plan_model

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
load_model(sys.argv[2])  # a tiny one: every import and thread is there
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
options = {"dtype": "bfloat16", "parallel": TensorParallel(1, int(sys.argv[3]))}
plan = plan_model(sys.argv[1], quantization=sys.argv[4] or None, **options)
arithmetic = replace(plan.placement.arithmetic, quantized=lambda record: record)
model = replace(plan, placement=replace(plan.placement, arithmetic=arithmetic)).load()
done.set()
watcher.join()
found = [w for m in model.modules() for w in vars(m).values() if isinstance(w, nk.Weight)]
quantized = sum(weight.num_bytes for weight in found if isinstance(weight, nk.Quantized))
weights = [weight.values for weight in found if not isinstance(weight, nk.Quantized)]
# oneDNN's packed tensors share their memory with no other, and have no address
tensors = {id(t) if t.is_mkldnn else t.data_ptr(): t for t in (*model.parameters(), *weights)}
shards = quantized + sum(tensor.nbytes for tensor in tensors.values())
print(json.dumps({"peak": max(peak, anonymous()) - before, "shards": shards}))
"""


def write_large_checkpoint(folder):
    """160 MiB in fp32, the largest tensor 16 MiB."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_peak_is_shards_and_one_tensor(tmp_path, tiny_checkpoint, quantization):
    whole = write_large_checkpoint(tmp_path / "large")
    tiny = tiny_checkpoint("llama")
    command = [sys.executable, "-c", LOAD_AND_WATCH, str(tmp_path / "large"), str(tiny), "2"]
    command.append(quantization)
    # A tensor of some MiB is returned to the system when it is freed, whatever came before it.
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=own).stdout
    seen = json.loads(out)
    assert seen["shards"] < whole / 4 + MIB  # half of the model, in half the bytes
    copies = 8 * MIB if quantization else 0  # of some rows in fp32
    assert seen["peak"] <= seen["shards"] + 16 * MIB + copies + 8 * MIB  # 8 MiB for a process
    assert seen["peak"] < whole / 2


def test_slices_are_read_one_at_a_time(tiny_checkpoint, loaded_tensors, monkeypatch):
    """The same by counting: no tensor that the loader makes is larger than its shard."""
    from nv_models import TensorParallel, load_model  # noqa: PLC0415

    folder = tiny_checkpoint()
    sizes = []
    real = torch.Tensor.copy_

    def copy(target, source, *rest):
        sizes.append((source.numel(), target.numel()))
        return real(target, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    model = load_model(folder, parallel=TensorParallel(0, 2))
    assert all(read == kept for read, kept in sizes)
    assert sum(read for read, _ in sizes) == sum(tensor.numel() for tensor in loaded_tensors(model))

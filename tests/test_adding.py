"""The diffs of docs/add-….md, applied to a copy of the packages, do what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
QWEN2 = """
import sys
import nv_kernels as nk
import torch
from nv_models import ForwardContext, load_model
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
theirs = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)).eval()
with torch.no_grad():
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
theirs.save_pretrained(sys.argv[1])
ours = load_model(sys.argv[1])
shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16}
backend = nk.attention_backend("torch", device="cpu", dtype=torch.float32, **shape)
token_ids = torch.tensor([11, 7, 300, 5])
attention = nk.AttentionMetadata(
    torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32),
    torch.tensor([[1]], dtype=torch.int32), max_query_len=4, max_context_len=4, num_decodes=0,
)
layout = backend.kv_layout(2, torch.float32)
context = ForwardContext(
    positions=torch.arange(4), slot_mapping=16 + torch.arange(4), attention=attention,
    plans=backend.plan(attention), backend=backend,
    kv_caches=[layout.allocate("cpu") for _ in range(2)],
)
with torch.inference_mode():
    got = ours.logits(ours(token_ids, context))
    want = theirs(token_ids[None]).logits[0]
torch.testing.assert_close(got.float(), want, rtol=1e-4, atol=1e-4)
print("equal")
"""
REFUSED = """
from nv_models.architectures import supported_architecture
try:
    supported_architecture(["Qwen2ForCausalLM"])
except ValueError as error:
    print(error)
"""
OP = """
import nv_kernels as nk
import torch
from nv_kernels.elementwise import triton_gelu

torch.manual_seed(0)
x = torch.randn(3, 2 * 1100)
want = nk.reference.gelu_and_mul(x)
assert torch.equal(nk.gelu_and_mul(x), want)
torch.testing.assert_close(triton_gelu.gelu_and_mul(x), want)
print("equal")
"""
WEIGHT = """
import nv_kernels as nk
import torch

torch.manual_seed(0)
weight = nk.Mxfp4(
    torch.randint(256, (6, 32), dtype=torch.uint8),
    torch.randint(120, 130, (6, 2), dtype=torch.uint8),
)
rows = []
for row in range(6):
    values = []
    for column in range(64):
        code = int(weight.codes[row, column // 2]) >> 4 * (column % 2) & 15
        value = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1 if code & 8 else 1)
        values.append(value * 2.0 ** (int(weight.scale[row, column // 32]) - 127))
    rows.append(values)
dense = torch.tensor(rows)
assert torch.equal(weight.dense(torch.float32), dense)
assert weight.num_bytes == 6 * (32 + 2)
stack = nk.Mxfp4.stack([weight, weight.rows(torch.tensor([5, 1]))])
x, bias = torch.randn(9, 64), torch.randn(8)
norm = torch.nn.RMSNorm(64, 1e-6).requires_grad_(False)
wanted = torch.cat([dense, dense[[5, 1]]])
for name in ("fast", "batch_invariant"):
    made = nk.arithmetic(name).quantized(stack)
    torch.testing.assert_close(made.linear(x, bias), x @ wanted.T + bias)
    torch.testing.assert_close(made.logits(x), x @ wanted.T)
    out, _ = made.norm_linear(nk.Stream(x), norm)
    torch.testing.assert_close(out, nk.rms_norm(x, norm.weight, 1e-6) @ wanted.T)
whole = made.linear(x.bfloat16())
assert torch.equal(made.linear(x[4:5].bfloat16()), whole[4:5])
print("equal")
"""
BACKEND = """
import nv_kernels as nk
import torch
from nv_engine import EngineConfig

torch.manual_seed(0)
shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
backend = nk.attention_backend("loop", device="cpu", dtype=torch.float32, **shape)
kv = backend.kv_layout(8, torch.float32).allocate("cpu")
kv.k.normal_()
kv.v.normal_()
metadata = nk.AttentionMetadata(  # two decode rows, the second empty, and a chunk after 17 tokens
    query_start=torch.tensor([0, 1, 2, 7], dtype=torch.int32),
    context_lens=torch.tensor([33, 0, 22], dtype=torch.int32),
    block_tables=torch.tensor([[5, 2, 7], [0, 0, 0], [1, 3, 0]], dtype=torch.int32),
    max_query_len=5, max_context_len=33, num_decodes=2,
)
q = torch.randn(7, 4, 32)
spec = nk.AttentionSpec(0.2)
got = backend.attend(q, kv, metadata, backend.plan(metadata)[None], spec)
torch.testing.assert_close(got, nk.reference.attention(q, kv, metadata, spec))
print(backend.name, EngineConfig(model="demo", attention_backend="loop").attention_backend)
"""
EXECUTOR = """
import json, pathlib, sys
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

config = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
}
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(json.dumps(config))
for name in (None, "thread"):
    engine = Engine(EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=2,
        distributed_executor_backend=name,
    ))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add(EngineRequest([11, 7, 300, 5], params))
    token_ids = []
    while engine.has_unfinished:
        for update in engine.step().updates:
            token_ids += update.token_ids
    engine.close()
    print(type(engine.executor).__name__, *token_ids)
"""
SAMPLING = """
import json, pathlib, sys
import nv_kernels as nk
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_kernels.sampling import triton_controls

torch.manual_seed(0)
slots, length = torch.tensor([1, 5, 0]), torch.tensor([4, 4, 4])  # slot 5 has no row: neutral
controls = nk.LogitControls(
    slots, length, even_bias=torch.tensor([2.5, -1.0, 0.0]),
    bias_ids=torch.tensor([[4, 7], [-1, -1]]), bias_values=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
)
logits = torch.randn(3, 2100)
want = logits.clone()
want[0, ::2] -= 1.0
want[2, ::2] += 2.5
want[2, [4, 7]] = logits[2, [4, 7]] + 1.0 + torch.tensor([2.5, 0.0])
shaped = nk.reference.shape_logits(logits, controls)
torch.testing.assert_close(shaped, want)
assert torch.equal(triton_controls.shape_logits(logits, controls), shaped)

config = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
}
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(json.dumps(config))
engine = Engine(EngineConfig(model=str(folder), load_format="dummy", device="cpu", max_num_seqs=4))
asked = [100.0, 0.0, -100.0]
for bias in asked:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, even_bias=bias)
    engine.add(EngineRequest([11, 7, 300, 5], params))
drawn = {0: [], 1: [], 2: []}
while engine.has_unfinished:
    for update in engine.step().updates:
        drawn[update.request_id] += update.token_ids
print([sorted({token % 2 for token in drawn[row]}) for row in drawn])
"""


def diffs_of(page: str) -> list[str]:
    """The diffs that a page shows."""
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert diffs, page
    return diffs


def with_diffs(
    page: str, folder: Path, *, is_there: bool = False, take_out: bool = False
) -> dict[str, str]:
    """An environment in which the packages are a copy with a page's diffs applied.

    Args:
        page: of docs/.
        folder: for the copy.
        is_there: the packages have the diffs already: they are taken out first.
        take_out: leave them out.
    """
    for package in (ROOT / "packages").glob("*/src"):
        target = folder / "packages" / package.parent.name
        target.mkdir(parents=True)
        subprocess.run(["cp", "-r", package, target], check=True)
    ways = ["--reverse"] * is_there + ["--recount"] * (not take_out)
    for way in ways:
        for diff in diffs_of(page):
            command = ["git", "apply", "--recount", way, "-"]
            subprocess.run(command, input=diff, text=True, cwd=folder, check=True)
    paths = [str(path) for path in (folder / "packages").glob("*/src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def output_of(script: str, environment: dict[str, str], *arguments: object) -> str:
    """The output of a script with the changed packages."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_qwen2_is_a_file_and_a_line(tmp_path):
    environment = with_diffs("add-a-model.md", tmp_path, is_there=True)
    assert output_of(QWEN2, environment, tmp_path / "checkpoint").splitlines()[-1] == "equal"
    (diff,) = diffs_of("add-a-model.md")
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    row, table = 10, 2  # lines of the file; an import and an entry of the table
    assert len(added) == row + table
    assert not re.search(r"^-(?!--)", diff, re.MULTILINE)


def test_without_its_row_qwen2_is_refused(tmp_path):
    environment = with_diffs("add-a-model.md", tmp_path, is_there=True, take_out=True)
    message = output_of(REFUSED, environment)
    assert message.startswith("architecture Qwen2ForCausalLM is not supported; supported are Qwen3")


def test_an_op_is_a_definition_and_a_version_that_is_compared_with_it(tmp_path):
    environment = with_diffs("add-an-op.md", tmp_path) | {"TRITON_INTERPRET": "1"}
    assert output_of(OP, environment) == "equal"


def test_a_kind_of_quantized_weight_is_a_file_and_a_name(tmp_path):
    environment = with_diffs("add-a-quantization.md", tmp_path)
    assert output_of(WEIGHT, environment) == "equal"
    (diff,) = diffs_of("add-a-quantization.md")
    added = re.findall(r"^\+(?!\+\+)", diff.partition("/__init__.py")[2], re.MULTILINE)
    assert len(added) == 2  # an import and a name


def test_a_backend_is_a_file_and_its_name(tmp_path):
    environment = with_diffs("add-a-backend.md", tmp_path)
    assert output_of(BACKEND, environment) == "loop loop"


def test_a_sampling_option_is_a_flag_a_table_and_its_formula(tmp_path):
    environment = with_diffs("add-a-sampling-option.md", tmp_path) | {"TRITON_INTERPRET": "1"}
    assert output_of(SAMPLING, environment, tmp_path / "model") == "[[0], [0, 1], [1]]"


def test_an_executor_is_a_file_and_its_name(tmp_path):
    environment = with_diffs("add-an-executor.md", tmp_path)
    local, thread = output_of(EXECUTOR, environment, tmp_path / "model").splitlines()
    assert local.split()[0] == "LocalExecutor"
    assert thread.split()[0] == "ThreadExecutor"
    assert thread.split()[1:] == local.split()[1:]
    assert len(local.split()) == 7

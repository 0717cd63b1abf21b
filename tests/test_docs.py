"""The docs' links and file paths lead somewhere, and the map of the kernels has them all."""

import json
import re
import traceback
from pathlib import Path

import pytest
from nv_api import LLM, SamplingParams
from nv_kernels.attention.cpp import CPUAttention
from nv_models.architectures import ARCHITECTURES

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "packages" / "nv-kernels" / "src" / "nv_kernels"
FOLDERS = (".", "docs", "benchmarks", "packages/*")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))
SOURCES = [ROOT, ROOT / "packages", *ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/src/*")]
PLACES = [
    *SOURCES,
    *ROOT.glob("packages/*"),
    ROOT / "benchmarks",
    ROOT / "benchmarks" / "results",
    ROOT / "benchmarks" / "results" / "h200",
    KERNELS / "cache",
    KERNELS / "linear",
    ROOT / "packages" / "nv-engine" / "src" / "nv_engine" / "executor",
]
A_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|cpp|h|toml|svg)|[\w-]+\.json)`")
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
OURS = re.compile(r"/packages/nv-\w+/src/(nv_\w+/.*)")
OF_A_MODEL = {
    "adapter_config.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "modules.json",
    "quant_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def prose(page):
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for path in set(A_PATH.findall(prose(page))) - OF_A_MODEL:
        if "…" not in path and not path.endswith("index.json"):
            assert any((place / path).exists() for place in [*PLACES, page.parent]), path


def test_the_map_of_the_kernels_has_every_file_with_a_kernel():
    text = (ROOT / "docs" / "kernels.md").read_text()
    for path in KERNELS.rglob("*.py"):
        if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.MULTILINE):
            assert f"`{path.relative_to(KERNELS)}`" in text, path


def test_the_table_of_models_has_every_architecture():
    text = (ROOT / "docs" / "models.md").read_text()
    for name, row in ARCHITECTURES.items():
        (line,) = [
            line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line
        ]
        assert row.gguf is None or line.rstrip(" |").endswith(f"`{row.gguf}`"), name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_the_way_down_is_the_call_stack_of_attention(tmp_path):
    """Walk the way on a CPU: the files of the stack are those of the table, in its order."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    llm = LLM(str(tmp_path), load_format="dummy", device="cpu", skip_tokenizer_init=True)
    stacks = []
    attend = CPUAttention.attend

    def look(self, *arguments, **more):
        frames = traceback.extract_stack()[:-1]
        stacks.append([found[1] for frame in frames if (found := OURS.search(frame.filename))])
        return attend(self, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUAttention, "attend", look)
        llm.generate([11, 7, 5], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    llm.close()
    page = (ROOT / "docs" / "life-of-a-request.md").read_text()
    way = re.findall(r"^\| \d+ \| `([^`]+)`", page, re.MULTILINE)
    beside = set(re.findall(r"`(nv_\w+/[\w/]+\.py)`", page)) - set(way)
    assert len(way) == 13
    stack = [path for path in dict.fromkeys(stacks[-1]) if path not in beside]
    assert stack == [path for path in way if path in stack]
    assert {"nv_api/llm.py", "nv_engine/engine.py", "nv_models/decoder.py"} <= set(stack)

"""Touches every layer once: text in, text out, and the same greedy ids as transformers."""

import importlib.util
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_WRITER = Path(__file__).parent.parent / "packages" / "nv-models" / "tests" / "gguf_writer.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


def test_generate_equals_transformers(checkpoint: Path) -> None:
    prompts = ["hello", "the quick brown fox jumps over the lazy dog", "x"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(checkpoint), device="cpu", kvcache_block_size=16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        with torch.inference_mode():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output["token_ids"] == ids[start:]
        assert output["text"] == tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_ids_past_the_tokenizers_are_not_drawn(tmp_path: Path) -> None:
    """Of a padded vocabulary of 400 the tokenizer knows 258; without it every id is drawn."""
    folder = make(tmp_path, vocab_size=400)
    params = SamplingParams(temperature=50.0, max_tokens=60, ignore_eos=True, seed=1)
    named = SamplingParams(allowed_token_ids=[300], max_tokens=2, ignore_eos=True)
    with LLM(str(folder), device="cpu", max_model_len=128) as llm:
        drawn, asked = llm.generate([[5, 6]] * 2, [params, named], use_tqdm=False)
    assert max(drawn["token_ids"]) < 258
    assert asked["token_ids"] == [300, 300]
    with LLM(str(folder), device="cpu", max_model_len=128, skip_tokenizer_init=True) as llm:
        (every,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert max(every["token_ids"]) >= 258


def test_a_gguf_file_runs_if_its_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("gguf_writer", GGUF_WRITER)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    folder = make(tmp_path / "tiny", vocab_size=320, tie_word_embeddings=False)
    writer.write_gguf(folder, file, GGMLQuantizationType.F32, pre="qwen2")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    drawn = []
    for given, format_ in ((folder, "safetensors"), (file, "auto"), (file, "gguf")):
        with LLM(str(given), load_format=format_, **options) as llm:
            (output,) = llm.generate([[5, 6, 77]], params, use_tqdm=False)
        drawn.append(output["token_ids"])
    assert drawn[0] == drawn[1] == drawn[2]
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in it"):
        LLM(str(file), load_format="safetensors", **options)

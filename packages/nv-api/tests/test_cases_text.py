"""Conformance cases of sampling and text, on a model whose next-token logits are chosen."""

import json
import shutil

import pytest
import torch
from nv_api import LLM, SamplingParams
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

# most tokens of these models never come, and have rows of zeros in the head
pytestmark = pytest.mark.filterwarnings("ignore:.*all zeros")

VOCAB = 320
EOS = 256
EOS_TOO = 257
PIECES = ["hell", "o", "Ġw", "ST", "OP", "x", "y", "z"]
"""The model's answer after a newline, token by token; then EOS."""
SAID = "hello wSTOPxyz"


def write_chain(folder, logits_VV, target):
    """A checkpoint whose logits after token t are row t, whatever came before.

    Its one layer adds nothing to the embeddings, which are the unit vectors.
    """
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": VOCAB, "num_hidden_layers": 1, "tie_word_embeddings": False}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(target)
    config["eos_token_id"] = [EOS, EOS_TOO]
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").unlink()
    tensors = load_file(target / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] *= 1e-30  # zeros would be warned of
    length = VOCAB**0.5  # of a normalized unit vector; a large one, so that eps does not show
    tensors["model.embed_tokens.weight"] = 100 * torch.eye(VOCAB)
    tensors["lm_head.weight"] = (logits_VV.T / length).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def start(folder):
    return LLM(str(folder), device="cpu", kvcache_block_size=16, num_kvcache_blocks=64)


@pytest.fixture(scope="module")
def drawer(folder, tmp_path_factory):
    """Always the same four tokens, with probabilities .1, .2, .3 and .4."""
    logits_VV = torch.full((VOCAB, VOCAB), -100.0)
    logits_VV[:, 10:14] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    with start(write_chain(folder, logits_VV, tmp_path_factory.mktemp("drawer"))) as llm:
        yield llm


@pytest.fixture(scope="module")
def quitter(folder, tmp_path_factory):
    """EOS, the other EOS and two more tokens, likely in this order."""
    logits_VV = torch.full((VOCAB, VOCAB), -100.0)
    logits_VV[:, [EOS, EOS_TOO, 20, 21]] = torch.tensor([9.0, 8.0, 2.0, 1.0])
    with start(write_chain(folder, logits_VV, tmp_path_factory.mktemp("quitter"))) as llm:
        yield llm


@pytest.fixture(scope="module")
def speaker(folder, byte_level, tmp_path_factory):
    """PIECES, one after the other, from a newline on."""
    said = [*byte_level.convert_tokens_to_ids(["Ċ", *PIECES]), EOS]
    assert len({*said}) == len(said)
    logits_VV = torch.zeros(VOCAB, VOCAB)
    logits_VV[said[:-1], said[1:]] = 50.0
    with start(write_chain(folder, logits_VV, tmp_path_factory.mktemp("speaker"))) as llm:
        yield llm


def draw(llm, **params):
    """How often each token came in 1,000 draws."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, **params)
    outputs = llm.generate([[i] for i in range(10)], params, use_tqdm=False)
    return torch.bincount(torch.tensor([o["token_ids"] for o in outputs]).flatten(), minlength=14)


def test_top_p_keeps_the_smallest_set_that_reaches_it(drawer):
    """N02. Three standard deviations of the draws' number are 46."""
    assert draw(drawer)[10:].tolist() == pytest.approx([100, 200, 300, 400], abs=60)
    kept = draw(drawer, top_p=0.6)
    assert kept[:12].sum() == 0
    assert kept[12:].tolist() == pytest.approx([3000 / 7, 4000 / 7], abs=60)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.39])
def test_top_p_near_zero_keeps_one(drawer, top_p):
    """N02."""
    assert draw(drawer, top_p=top_p).nonzero().tolist() == [[13]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_eos(quitter, temperature):
    """N38."""
    params = SamplingParams(temperature=temperature, min_tokens=5, max_tokens=9)
    outputs = quitter.generate([[i] for i in range(16)], params, use_tqdm=False)
    for output in outputs:
        assert {*output["token_ids"][:5]} <= {20, 21}
        assert {*output["token_ids"][5:-1]} <= {20, 21}
        assert output.outputs[0].finish_reason == "stop"
    ends = {output["token_ids"][-1] for output in outputs}
    assert ends == ({EOS} if temperature == 0 else {EOS, EOS_TOO})
    (output,) = quitter.generate([[3]], SamplingParams(temperature=0), use_tqdm=False)
    assert output["token_ids"] == [EOS]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "before", "num_tokens"),
    [
        ("TO", "hello wS", 5),  # begins and ends within a token
        ("STOP", "hello w", 5),
        ("o w", "hell", 3),
        ("x", "hello wSTOP", 6),
        ("wSTOPx", "hello ", 6),
    ],
)
def test_a_stop_string_cuts_exactly(speaker, stop, before, num_tokens, include):
    """N35, not streamed; the tokens end with the one that completes the stop string."""
    params = SamplingParams(
        temperature=0, max_tokens=50, stop=["zz", stop], include_stop_str_in_output=include
    )
    (output,) = speaker.generate("go\n", params, use_tqdm=False)
    assert output["text"] == (before + stop if include else before)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert speaker.tokenizer.convert_ids_to_tokens(output["token_ids"]) == PIECES[:num_tokens]
    assert speaker.is_finished()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["TO", "STOP", "o w", "x", "wSTOPx", "zz"])
def test_a_stream_never_shows_a_part_of_a_stop_string(speaker, stop, include):
    """N35, streamed: pieces are never taken back, so no part of a stop string is among them."""
    params = SamplingParams(
        temperature=0, max_tokens=50, stop=stop, include_stop_str_in_output=include
    )
    messages = [{"role": "user", "content": "go"}]
    (whole,) = speaker.chat(messages, params, use_tqdm=False)
    text = SAID.partition(stop)[0]
    assert whole["text"] == (text + stop if include and stop in SAID else text)
    assert "".join(delta.text for delta in speaker.stream_chat(messages, params)) == whole["text"]
    assert speaker.is_finished()


def test_a_stream_brings_each_token_when_it_comes(speaker):
    """N35, streamed: only what may yet become a stop string waits, "OP" and "x" here."""
    messages = [{"role": "user", "content": "go"}]
    params = SamplingParams(temperature=0, max_tokens=50, stop="OPxz")
    pieces = [delta.text for delta in speaker.stream_chat(messages, params)]
    assert list(filter(None, pieces)) == ["hell", "o", " w", "ST", "OPxy", "z"]

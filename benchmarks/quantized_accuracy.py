"""How far a model with quantized weights is from the same model in bf16, by form.

Both read the same text, passages of `--length` tokens, at once. At each of its places (8 x 250)
two things count: the KL divergence of the form's next token from bf16's, in nats, and whether the
likeliest token is the same ("agreement"). So an earlier difference does not count again, as it
would in free answers. The row of fp32 shows what rounding to bf16 alone costs.

The checkpoint must be in floats, or the demo, which is dequantized to bf16 first. Its quantized
forms are made here by rounding to nearest (`round_to_nearest.py`); fp8 is made by
`quantization="fp8"`. K-quants have blocks of 256 columns: matrices that are not whole blocks have
the kind that llama.cpp takes for them. The text is `--text`, or Python's own documentation for a
model with a tokenizer, and held-out bytes for the checkpoint of `train_tiny.py`.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nv_kernels as nk
import torch
from k_quants import BLOCK as K_BLOCK
from nv_models import CausalLM, ForwardContext, plan_model, resolve
from report import report
from round_to_nearest import (
    BLOCK,
    Floats,
    Scheme,
    awq,
    fp8_blocks,
    fp8_tensor,
    gptq,
    int8,
    packed,
)
from train_tiny import held_out_passages

NUM_PASSAGES, LENGTH = 8, 250
BLOCK_SIZE = 16
GROUP_SIZES = (128, 64, 32)
GGUF_KINDS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K")


class Form(NamedTuple):
    """A checkpoint, and options of `plan_model`."""

    path: Path
    options: dict[str, Any]


class Answer(NamedTuple):
    """The reading of the text by a model.

    Attributes:
        logprobs: [T, V] of each passage.
        num_bytes: of all weights.
        layer_bytes: of the layers' matrices.
    """

    logprobs: list[torch.Tensor]
    num_bytes: int
    layer_bytes: int


def forms(source: Floats, model: str, folder: Path) -> Iterator[tuple[str, Form]]:
    """Write each form when its turn has come."""
    plain = source.write(folder / "floats")
    yield "bf16", Form(plain, {"dtype": "bfloat16"})
    yield "fp32", Form(plain, {"dtype": "float32"})
    yield "fp8 made while loading", Form(plain, {"quantization": "fp8"})
    for name, scheme in schemes(source).items():
        yield name, Form(source.write(folder / name, scheme), {})
    for kind in GGUF_KINDS:
        yield f"GGUF {kind}", Form(source.write_gguf(folder / kind, kind), {})
    if model == "demo":
        yield "its own file", Form(resolve(model), {"dtype": "bfloat16"})


def schemes(source: Floats) -> dict[str, Scheme]:
    """Those whose groups or blocks divide the model's matrices."""
    shapes = [tuple(t.shape) for name, t in source.tensors.items() if "_proj" in name]
    fits = [size for size in GROUP_SIZES if all(k % size == 0 for _, k in shapes)]
    large, small = fits[0], fits[-1]
    found = {"fp8, a scale per matrix": fp8_tensor()}
    if all(n % BLOCK == 0 and k % BLOCK == 0 for n, k in shapes):
        found["fp8, blocks of 128"] = fp8_blocks()
    return found | {
        "W8A8": int8(),
        f"W8A16, groups of {large}": packed(8, large),
        f"W4A16, groups of {large}": packed(4, large),
        f"W4A16, groups of {small}": packed(4, small),
        f"AWQ, groups of {large}": awq(large),
        f"AWQ, groups of {small}": awq(small),
        f"GPTQ, 4 bits, groups of {large}": gptq(4, large),
    }


def k_quants_share(source: Floats) -> float:
    """The share of the values of the layers' matrices that K-quants hold."""
    matrices = [tensor for name, tensor in source.tensors.items() if "_proj" in name]
    held = sum(tensor.numel() for tensor in matrices if tensor.shape[1] % K_BLOCK == 0)
    return held / sum(tensor.numel() for tensor in matrices)


def passages_of(model: str, text: str | None, count: int, length: int) -> list[list[int]]:
    """Evenly spaced passages of ids."""
    path = resolve(model)
    if text is None and not any(path.glob("tokenizer*")):
        return held_out_passages(count, length)
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path).encode(text or documentation(), verbose=False)
    stride = (len(ids) - length) // count
    if stride < length:
        raise ValueError(f"the text has {len(ids)} tokens: it must have {count * length + length}")
    return [ids[i * stride : i * stride + length] for i in range(count)]


def documentation() -> str:
    """English text that every Python has: the topics of its `help`."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def answer(form: Form, passages: list[list[int]], device: str) -> Answer:
    """Load a form and read the text."""
    plan = plan_model(form.path, device=device, **form.options)
    model = plan.load()
    read = reader(model, max(map(len, passages)), device)
    logprobs = [read(ids).log_softmax(-1).cpu() for ids in passages]
    return Answer(logprobs, plan.num_bytes, plan.layer_bytes)


def reader(model: CausalLM, length: int, device: str) -> Callable[[list[int]], torch.Tensor]:
    """A function from a passage of at most `length` ids to logits [T, V]."""
    config, at = model.config, torch.device(device)
    backend = nk.attention_backend(
        "auto",
        device=at,
        dtype=config.dtype,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        specs=[layer.attention for layer in config.layers],
    )
    num_blocks = -(-length // BLOCK_SIZE)
    layout = backend.kv_layout(num_blocks, config.dtype)
    caches = [layout.allocate(at) for _ in range(config.num_layers)]

    @torch.inference_mode()
    def read(ids: list[int]) -> torch.Tensor:
        count = len(ids)
        step = nk.AttentionMetadata(
            torch.tensor([0, count], dtype=torch.int32, device=at),
            torch.tensor([count], dtype=torch.int32, device=at),
            torch.arange(num_blocks, dtype=torch.int32, device=at)[None],
            max_query_len=count,
            max_context_len=count,
            num_decodes=0,
        )
        places = torch.arange(count, device=at)
        plans = backend.plan(step, config.windows)
        context = ForwardContext(places, places, step, plans, backend, caches)
        return model.logits(model(torch.tensor(ids, device=at), context))

    return read


def compared(form: Answer, truth: Answer) -> dict[str, float]:
    """A form's figures beside bf16's."""
    distances, same = [], 0
    for ours, theirs in zip(form.logprobs, truth.logprobs, strict=True):
        distances.append((theirs.exp() * (theirs - ours)).sum(-1))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    kl = torch.cat(distances)
    return {
        "mean_kl": float(f"{kl.mean().item():.3g}"),
        "largest_kl": float(f"{kl.max().item():.3g}"),
        "agreement_percent": round(100 * same / len(kl), 2),
        "layers_of_bf16": round(form.layer_bytes / truth.layer_bytes, 3),
        "weights_of_bf16": round(form.num_bytes / truth.num_bytes, 3),
    }


def perplexity(found: Answer, passages: list[list[int]]) -> float:
    """Of each passage's ids but its first."""
    own = [
        logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])
        for logprobs, ids in zip(found.logprobs, passages, strict=True)
    ]
    return round(float(torch.cat(own).mean().neg().exp()), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a folder in floats, or demo")
    parser.add_argument("--text", type=Path, help="a file to read; needs a tokenizer")
    parser.add_argument("--passages", type=int, default=NUM_PASSAGES)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8") if args.text else None
    passages = passages_of(args.model, text, args.passages, args.length)
    figures: dict[str, dict[str, float]] = {}
    truth: Answer | None = None
    with tempfile.TemporaryDirectory() as folder:
        source = Floats.read(resolve(args.model))
        for name, form in forms(source, args.model, Path(folder)):
            found = answer(form, passages, args.device)
            truth = truth or found
            figures[name] = compared(found, truth) | {"perplexity": perplexity(found, passages)}
            print(f"{name:32}{figures[name]}", flush=True)
    places = sum(map(len, passages))
    head = {"model": Path(args.model).name, "places": places, "device": args.device,
            "k_quants_percent": round(100 * k_quants_share(source), 1)}  # fmt: skip
    report("quantized_accuracy", head | {"forms": figures}, args.save)


if __name__ == "__main__":
    main()

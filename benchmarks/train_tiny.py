"""Trains the small Qwen3 that numerics tests run: bytes of Python's own standard library.

Its weights are not noise, so that it shows the errors of an fp8 cache or of bf16. It uses plain
PyTorch and transformers and downloads nothing. Ids below 256 are bytes; END begins and ends a file.
"""

import argparse
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from report import report
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

END = 256
CONTEXT = 512
HELD_OUT_SHARE = 20  # one file in this many is held out
SKIPPED = {  # absent on some machines, tables, or from another project
    "__pycache__", "dist-packages", "encodings", "ensurepip", "lib2to3", "site-packages", "test",
    "tests", "idle_test",
}  # fmt: skip
SIZES = {
    "tiny": {"num_hidden_layers": 5, "hidden_size": 128, "intermediate_size": 384},
    "smallest": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128},
}


def library_files() -> dict[str, bytes]:
    """Sources of the running Python's standard library, by path inside it, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file()
    )
    kept = [name for name in names if not SKIPPED.intersection(Path(name).parts)]
    return {name: (root / name).read_bytes() for name in kept if "_sysconfigdata" not in name}


def token_ids(held_out: bool) -> torch.Tensor:
    """The files of one part, END around each: [N] int64."""
    end = torch.tensor([END])
    pieces = [end]
    for name, source in library_files().items():
        if source and (zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0) == held_out:
            pieces += [torch.frombuffer(bytearray(source), dtype=torch.uint8).long(), end]
    return torch.cat(pieces)


def held_out_passages(count: int, length: int) -> list[list[int]]:
    """Evenly spaced passages of the files that training never saw, as byte ids."""
    ids = token_ids(held_out=True)
    stride = (len(ids) - length) // count
    return [ids[i * stride : i * stride + length].tolist() for i in range(count)]


def new_model(size: str, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320,  # 256 bytes and END, rounded up to a multiple of 64
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        dtype="float32",
        **SIZES[size],
    )
    return Qwen3ForCausalLM(config)


def learning_rate(step: int, progress: float, peak: float) -> float:
    """100 steps up, then a cosine down to a twentieth of the peak."""
    return peak * min(1.0, (step + 1) / 100) * (0.525 + 0.475 * math.cos(math.pi * progress))


def batch_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, device: str) -> torch.Tensor:
    """Mean negative log-likelihood, in nats, of each next token: ids [batch, CONTEXT + 1]."""
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.inference_mode()
def bits_per_byte(model: Qwen3ForCausalLM, num_passages: int, device: str) -> float:
    """Of the held-out part, in the arithmetic of training."""
    passages = torch.tensor(held_out_passages(num_passages, CONTEXT + 1), device=device)
    losses = [batch_loss(model, part, device) for part in passages.split(32)]
    weights = [len(part) for part in passages.split(32)]
    total = sum(float(x) * n for x, n in zip(losses, weights, strict=True))
    return total / num_passages / math.log(2)


def train(model: Qwen3ForCausalLM, args: argparse.Namespace) -> int:
    """Run the steps, or as many as fit into --seconds; returns the number of steps."""
    text = token_ids(held_out=False).to(args.device)
    window = torch.arange(CONTEXT + 1, device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    start, step, progress = time.perf_counter(), 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, args.learning_rate)
        starts = torch.randint(
            len(text) - CONTEXT, (args.batch, 1), generator=generator, device=args.device
        )
        loss = batch_loss(model, text[starts + window], args.device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0:  # also keeps the host from running ahead of the clock
            seconds = time.perf_counter() - start
            print(f"step {step} {seconds:.1f} s {loss.item() / math.log(2):.4f} bits", flush=True)
        step += 1
        progress = max(step / args.steps, (time.perf_counter() - start) / args.seconds)
    return step


def save(model: Qwen3ForCausalLM, folder: Path) -> int:
    """Write config.json and model.safetensors in bf16; returns their bytes."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # it repeats config.json
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop earlier after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {CONTEXT} a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--held-out-passages", type=int, default=256)
    parser.add_argument("--save", help="file for the JSON line")
    args = parser.parse_args()
    model = new_model(args.size, args.seed).to(args.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    before = bits_per_byte(model, args.held_out_passages, args.device)
    start = time.perf_counter()
    steps = train(model, args)
    figures = {
        "parameters": num_parameters,
        "steps": steps,
        "tokens": steps * args.batch * CONTEXT,
        "seconds": round(time.perf_counter() - start, 1),
        "held_out_bits_per_byte_untrained": round(before, 4),
        "held_out_bits_per_byte": round(
            bits_per_byte(model, args.held_out_passages, args.device), 4
        ),
    }
    figures["checkpoint_bytes"] = save(model, args.out)
    figures["held_out_bits_per_byte_as_saved"] = round(
        bits_per_byte(model, args.held_out_passages, args.device), 4
    )
    report("train_tiny", figures, args.save)


if __name__ == "__main__":
    main()

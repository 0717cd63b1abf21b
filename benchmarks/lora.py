"""Adapters in one batch: the time of a step beside that of the same engine without adapters.

Random weights and random adapters of all seven projections. Each case is a share of the engine
without adapters, in the same run. The bound of a case is the base's own time plus the time to read
the adapters of its rows once.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nv_api import LLM, LoRARequest, SamplingParams
from report import read_ceiling, report
from safetensors.torch import save_file
from workload import model_folder

PROMPT, SHORT, LONG = 128, 17, 145
"""Tokens of a prompt; the difference of runs of SHORT and LONG tokens is the decode steps alone."""
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip


def write_adapters(folder: Path, model: Path, rank: int, count: int) -> list[LoRARequest]:
    """Adapters with names of their own and equal bytes, which lie once on the disk."""
    config = json.loads((model / "config.json").read_text())
    size, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (q, size), "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size), "self_attn.o_proj": (size, q),
        "mlp.gate_proj": (width, size), "mlp.up_proj": (width, size),
        "mlp.down_proj": (size, width),
    }  # fmt: skip
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a, b = torch.randn(rank, columns), torch.randn(rows, rank)
            tensors[f"{name}.lora_A.weight"] = (a * columns**-0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (b * 0.02).bfloat16()
    first = folder / f"rank{rank}.safetensors"
    save_file(tensors, first)
    requests = []
    for number in range(1, count + 1):
        own = folder / f"rank{rank}-{number}"
        own.mkdir()
        os.link(first, own / "adapter_model.safetensors")
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (own / "adapter_config.json").write_text(json.dumps(values))
        requests.append(LoRARequest(own.name, number, str(own)))
    return requests


class Measured:
    """One engine and its figures."""

    def __init__(self, model: Path, args: argparse.Namespace, **options: Any) -> None:
        if args.tiny:
            options |= {"device": "cpu", "num_kvcache_blocks": 600, "dtype": "float32"}
        self.llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=64 if not args.tiny else 8,
            max_model_len=1280,
            gpu_memory_utilization=0.85,
            **options,
        )
        self.repeats, self.seed = args.repeats, 0

    def prompts(self, count: int, length: int) -> list[list[int]]:
        self.seed += 1
        return [[(7 * i + 13 * self.seed + n) % 300 for i in range(length)] for n in range(count)]

    def seconds(self, count: int, length: int, out: int, loras: list[Any]) -> float:
        """One list of requests, from its start to its end."""
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        given = [loras[n % len(loras)] for n in range(count)] if loras else None
        prompts, begun = self.prompts(count, length), time.perf_counter()
        outputs = self.llm.generate(prompts, params, False, given)
        elapsed = time.perf_counter() - begun
        bad = [o for output in outputs for o in output.outputs if o.finish_reason != "length"]
        assert not bad, bad[0]
        return elapsed

    def decode(self, count: int, loras: list[Any]) -> float:
        """Milliseconds of a decode step.

        Two rounds come before: in the first the adapters are loaded, so that the rows begin at
        different times; a step of all prompts may be captured only in the second.
        """
        found: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(2 + self.repeats):
            for out, each in found.items():
                each.append(self.seconds(count, PROMPT, out, loras))
        short, long = (statistics.median(each[2:]) for each in found.values())
        return (long - short) / (LONG - SHORT) * 1e3

    def prefill(self, count: int, length: int, loras: list[Any]) -> float:
        """Milliseconds of a list of prompts."""
        found = [self.seconds(count, length, 1, loras) for _ in range(self.repeats + 1)]
        return statistics.median(found[1:]) * 1e3

    def load(self, count: int, loras: list[LoRARequest], late: LoRARequest) -> dict[str, float]:
        """The longest step while an adapter is read and loaded beside rows that decode.

        Beside it that of requests whose adapter is loaded: the step that takes the first one in
        runs eagerly, that of the second is captured, and from the third on it is replayed.
        """
        many = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
        few = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        result = {}
        for prompt in self.prompts(count - 1, PROMPT):
            self.llm.add_request(prompt, many, lora_request=loras[0])
        for _ in range(8):
            self.llm.step()
        resident = [(name, loras[0]) for name in ("eager", "captured", "resident")]
        for name, request in (*resident, ("loaded", late)):
            times, ended = [], False
            (prompt,) = self.prompts(1, 16)
            own = self.llm.add_request(prompt, few, lora_request=request)
            while not ended:
                begun = time.perf_counter()
                outputs, _ = self.llm.step()
                times.append(time.perf_counter() - begun)
                ended = any(request_id == own for request_id, _ in outputs)
            result[name] = max(times) / statistics.median(times)
            result[f"{name}_steps"] = len(times)
            if len(times) > 27:  # more than the copy and the request's own: its files are read
                result[f"{name}_while_read"] = max(times[:-27]) / statistics.median(times)
        while not self.llm.is_finished():
            self.llm.step()
        return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU: a dry run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then no new case")
    parser.add_argument("--save")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds

    bandwidth = 1e10 if args.tiny else read_ceiling()
    model = model_folder(args.model, **(TINY if args.tiny else {}))
    rows, long, slots = (8, 100, 4) if args.tiny else (64, 1024, 32)
    figures: dict[str, Any] = {"model": args.model, "prompt_len": PROMPT, "rows": rows}
    figures["repeats"] = args.repeats
    cases: dict[str, tuple[str, float, int]] = {}

    def measure(name: str, of: str, work: Callable[[], float], read: int) -> None:
        """Note the milliseconds of a case, the one to compare with, and the bytes of adapters."""
        if time.monotonic() < end:
            cases[name] = of, work(), read

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loras = write_adapters(folder, model, 16, slots + 1)
        plain = Measured(model, args)
        base = {
            "batch 1": plain.decode(1, []),
            f"batch {rows}": plain.decode(rows, []),
            "prefill": plain.prefill(rows, long, []),
        }
        plain.llm.close()
        del plain
        adapted = Measured(model, args, enable_lora=True, max_loras=slots, max_cpu_loras=slots + 1)
        size = (folder / "rank16.safetensors").stat().st_size
        for count in (8, 32, 1):
            mixed = loras[: min(count, slots)]
            work = partial(adapted.decode, rows, mixed)
            measure(f"batch {rows}, {count} mixed", f"batch {rows}", work, size * len(mixed))
        measure("batch 1, one", "batch 1", partial(adapted.decode, 1, loras[:1]), size)
        if time.monotonic() < end:
            figures["longest_over_median_step"] = adapted.load(rows, loras, loras[-1])
        mixed = loras[: min(8, slots)]
        work = partial(adapted.prefill, rows, long, mixed)
        measure("prefill, 8 mixed", "prefill", work, size * len(mixed))
        measure("batch 1, none", "batch 1", partial(adapted.decode, 1, []), 0)
        measure(f"batch {rows}, none", f"batch {rows}", partial(adapted.decode, rows, []), 0)
        adapted.llm.close()
        del adapted, work
        if time.monotonic() < end:
            large = write_adapters(folder, model, 64, 8)
            adapted = Measured(model, args, enable_lora=True, max_loras=8, max_lora_rank=64)
            size = (folder / "rank64.safetensors").stat().st_size
            work = partial(adapted.decode, rows, large)
            measure(f"batch {rows}, 8 mixed, rank 64", f"batch {rows}", work, size * 8)
            adapted.llm.close()
    figures["base_ms"] = {name: round(value, 3) for name, value in base.items()}
    figures["cases"] = {
        name: {
            "ms": round(milliseconds, 3),
            "share": round(milliseconds / base[of], 3),
            "bound_share": round(1 + read / bandwidth * 1e3 / base[of], 3),
        }
        for name, (of, milliseconds, read) in cases.items()
    }
    report("lora", figures, args.save)


if __name__ == "__main__":
    main()

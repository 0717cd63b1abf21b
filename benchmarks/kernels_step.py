"""All parts of a decode step except attention: products, norms, LM head, samplers, on one card.

Each row is timed in CUDA graphs, with rotating weights and logits so that they are not in L2,
against the bound (bytes over the read rate measured in the same run) and torch's or cuBLAS's
version. `kernels.py` runs it.
"""

from __future__ import annotations

import torch
from nv_kernels.linear.triton import logits as head
from nv_kernels.linear.triton import product as linear
from nv_kernels.sampling import triton_sample as sampling
from step_parts import (
    BF16,
    DEVICE,
    Model,
    error,
    graph_time,
    sampling_tensors,
    time_each,
)
from torch.nn import functional

VOCABULARY, HIDDEN = 151_936, 1024
CHAIN_TARGETS = {1: 0.42, 16: 0.58, 64: 0.70, 256: 1.10}
BIG = {"qkv": (6144, 4096, False), "output": (4096, 4096, False),
       "gate_up": (24576, 4096, True), "down": (4096, 12288, False)}  # fmt: skip
BIG_TARGETS = {1: 125, 16: 136}
HEAD_TARGETS = {1: 107, 64: 125, 256: 175}
# name: (temperature, top_k, top_p, min_p), target at 256 rows; temperature None: 0.3 to 1.3
SAMPLERS = {
    "greedy": ((0, 0, 1.0, 0.0), 30),
    "temperature": ((None, 0, 1.0, 0.0), 34),
    "k 50": ((None, 50, 1.0, 0.0), None),
    "k 50, p 0.9": ((None, 50, 0.9, 0.0), 65),
    "p 0.9": ((None, 0, 0.9, 0.0), 100),
    "min-p 0.05": ((None, 0, 1.0, 0.05), None),
    "k 1000": ((None, 1000, 1.0, 0.0), 150),
    "k 1000, p 0.95": ((None, 1000, 0.95, 0.0), None),
}


def chain_rows(rate):
    """28 layers of Qwen3-0.6B without attention; a copy stands in for it."""
    model = Model(HIDDEN, 16, 8, 3072, 28)
    weights = sum(
        tensor.nbytes
        for layer in model.layers
        for tensor in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    for tokens in (1, 2, 8, 16, 32, 64, 128, 256):
        inputs = model.inputs(tokens)
        truth = model.plain(*inputs, dtype=torch.float32)
        ours = graph_time(lambda inputs=inputs: model.run(*inputs)) / 1e3
        bare = graph_time(lambda inputs=inputs: model.run(*inputs, attend=flat)) / 1e3
        plain = graph_time(lambda inputs=inputs: model.plain(*inputs), reps=5) / 1e3
        yield {
            "what": "28 layers", "rows": tokens, "unit": "ms", "ours": ours,
            "without_stand_in": bare, "torch": plain, "bound": weights / rate * 1e3,
            "target": CHAIN_TARGETS.get(tokens),
            "error": error(model.run(*model.inputs(tokens)), truth),  # a run may overwrite x
            "torch_error": error(model.plain(*model.inputs(tokens)), truth),
        }  # fmt: skip


def flat(queries):
    return queries.flatten(1)


def big_rows(rate):
    """The four products of an 8B layer, each over rotated weights; norm, silu, residual fused."""
    for tokens in (1, 16):
        row = {"what": "8B products", "rows": tokens, "unit": "us", "ours": 0.0, "torch": 0.0,
               "bound": 0.0, "target": BIG_TARGETS[tokens], "parts": {}}  # fmt: skip
        for name, (rows, columns, gated) in BIG.items():
            count = max(3, int(400e6 / (rows * columns * 2)))
            weights = [
                (torch.randn(rows, columns, device=DEVICE) * 0.02).to(BF16) for _ in range(count)
            ]
            x = torch.randn(tokens, columns, device=DEVICE).to(BF16)
            out = torch.empty(tokens, rows, device=DEVICE, dtype=BF16)
            work = linear.gated_linear if gated else linear.linear_partials
            ours = time_each(lambda w, x=x, work=work: work(x, w), weights)
            library = time_each(lambda w, x=x, out=out: torch.mm(x, w.t(), out=out), weights)
            row["parts"][name] = {"ours": ours, "torch": library}
            row["ours"] += ours
            row["torch"] += library
            row["bound"] += rows * columns * 2 / rate * 1e6
            del weights
        yield row


def head_rows(rate):
    """LM head and a draw by temperature."""
    weights = [(torch.randn(VOCABULARY, HIDDEN, device=DEVICE) * 0.05).to(BF16) for _ in range(2)]
    for tokens in (1, 16, 64, 256):
        x = torch.randn(tokens, HIDDEN, device=DEVICE).to(BF16)
        draws = sampling_tensors(tokens)

        def logits(weight, x=x):
            return head.logits(x, weight)

        def plain(weight, x=x, draws=draws):
            values = functional.linear(x, weight).float() / draws.temperature[:, None]
            noise = torch.empty_like(values).exponential_()
            return (values.softmax(-1) / noise).argmax(-1)

        ours = time_each(lambda w, f=logits, d=draws: sampling.sample(f(w), d), weights * 2)
        yield {
            "what": "LM head + draw", "rows": tokens, "unit": "us", "ours": ours,
            "logits": time_each(logits, weights * 2),
            "torch": time_each(plain, weights),
            "bound": weights[0].nbytes / rate * 1e6, "target": HEAD_TARGETS.get(tokens),
        }  # fmt: skip


def sampler_rows(rate):
    """Each sampler at 256 rows and at one."""
    for rows in (256, 1):
        sets = [
            (torch.randn(rows, VOCABULARY, device=DEVICE) * 2.5).to(BF16)
            for _ in range(4 if rows == 256 else 16)
        ]
        for name, (setting, target) in SAMPLERS.items():
            draws = sampling_tensors(rows, *setting)
            ours = time_each(lambda x, d=draws: sampling.sample(x, d), sets)
            peer = sorted_peer if draws.any_filter else drawn_peer
            if setting[0] == 0:
                peer = greedy_peer
            yield {
                "what": name, "rows": rows, "unit": "us", "ours": ours,
                "torch": time_each(lambda x, d=draws, p=peer: p(x, d), sets[:2], reps=5),
                "bound": sets[0].nbytes / rate * 1e6, "target": target if rows == 256 else None,
            }  # fmt: skip


def greedy_peer(logits, _):
    return logits.argmax(-1)


def drawn_peer(logits, draws):
    mass = (logits.float() / draws.temperature[:, None]).softmax(-1)
    return (mass / torch.empty_like(mass).exponential_()).argmax(-1)


def sorted_peer(logits, draws):
    values, order = (logits.float() / draws.temperature[:, None]).sort(-1, descending=True)
    place = torch.arange(values.shape[1], device=DEVICE)
    limit = torch.where(draws.top_k > 0, draws.top_k, values.shape[1])[:, None]
    mass = values.masked_fill(place >= limit, float("-inf")).softmax(-1)
    mass = mass.masked_fill(mass.cumsum(-1) - mass >= draws.top_p[:, None], 0.0)
    mass = mass.masked_fill(mass < draws.min_p[:, None] * mass[:, :1], 0.0)
    drawn = (mass / torch.empty_like(mass).exponential_()).argmax(-1, keepdim=True)
    return order.gather(1, drawn)


PARTS = {"chain": chain_rows, "big": big_rows, "head": head_rows, "sampler": sampler_rows}

"""Measures: log-probabilities of a text, and how far tokens are from the likeliest.

Owns the measures; never a bound.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from torch import nn


def text_logprobs(checkpoint: Path, passages: list[list[int]], **options: object) -> list[float]:
    """Log-probability of every token of every passage but its first, through the engine."""
    defaults = {"max_num_seqs": 16, "kvcache_block_size": 64, "num_kvcache_blocks": 200}
    engine = Engine(EngineConfig(model=str(checkpoint), **defaults | options))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    said: dict[int, list[float]] = {
        engine.add(EngineRequest(passage, params)): [] for passage in passages
    }
    while engine.has_unfinished:
        for update in engine.step().updates:
            said[update.request_id] += [x.logprobs[0] for x in update.prompt_logprobs or ()]
    engine.close()
    assert [len(values) for values in said.values()] == [len(p) - 1 for p in passages]
    return [value for values in said.values() for value in values]


@torch.inference_mode()
def reference_logprobs(model: nn.Module, passages: list[list[int]]) -> list[float]:
    """The same of a transformers model, each passage in one forward."""
    found: list[float] = []
    for passage in passages:
        ids = torch.tensor([passage], device=model.device)
        logprobs_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
        found += logprobs_TV.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def perplexity(logprobs: Sequence[float]) -> float:
    """Of the tokens together."""
    return math.exp(-mean(logprobs))


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference of two lists of log-probabilities, in nats."""
    return mean(abs(a - b) for a, b in zip(left, right, strict=True))


def steps_behind(model: nn.Module, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far each drawn token is below the likeliest, in bf16 steps at the likeliest's logit.

    transformers computes the same logits in two ways, one forward of all tokens and a token at a
    time over its cache, which round differently: the nearer one counts.
    """
    both = (_logits_at_once(model, prompt, tokens), _logits_by_token(model, prompt, tokens))
    nearer = torch.minimum(*(_steps_below_best(logits, tokens) for logits in both))
    return nearer.tolist()


def _steps_below_best(logits_TV: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    best_T = logits_TV.amax(-1)
    own_T = logits_TV.gather(1, torch.tensor(tokens, device=logits_TV.device)[:, None])[:, 0]
    step_T = torch.exp2(best_T.abs().log2().floor() - 7)  # bf16 has 8 significant bits
    return (best_T - own_T) / step_T


@torch.inference_mode()
def _logits_at_once(model: nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


@torch.inference_mode()
def _logits_by_token(model: nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    out = model(torch.tensor([prompt], device=model.device), use_cache=True)
    rows = [out.logits[0, -1]]
    for token in tokens[:-1]:
        fresh = torch.tensor([[token]], device=model.device)
        out = model(fresh, past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows).float()

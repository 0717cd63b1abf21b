"""MixedSteps: how many tokens of prompts a step takes beside the rows that decode.

Owns that bound, and the numbers of decoding rows that steps with prompts are made for. Never
schedules, never pads.

The products of a step that only decodes are half empty: reading the weights takes as long as
multiplying some 200 tokens by them. Prompts in pieces of a few hundred tokens fill them (a layer of
Qwen3-8B on an H200: 128 tokens 131 us, 512 tokens 275, so 0.37 us per token, which takes 0.55 in
large steps of its own). And no decoding row waits for a long prompt.
(Chunked prefill, stall-free batching: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve, OSDI 2024.)
"""

from dataclasses import dataclass

LEAST_LAYER = 160_000_000
"""Bytes of a layer's weights from which its products are efficient at such sizes: with fewer,
launches take as long as they do, and few large steps are better. Measured with bf16."""
GRAIN = 32


@dataclass(frozen=True)
class MixedSteps:
    """Steps in which some rows decode and others compute prompts."""

    num_tokens: int = 512
    """Tokens that fill a step, decoding rows counted in GRAINs."""
    least: int = 256
    """Of prompts, however many rows decode."""

    def room(self, num_decodes: int) -> int:
        """Tokens of prompts that fill a step beside so many decoding rows.

        The same for all numbers of rows that are padded to one: full steps come in few layouts.
        """
        return max(self.num_tokens - -(-num_decodes // GRAIN) * GRAIN, self.least)

    def most(self, num_decodes: int, num_waiting: int, num_steps: int) -> int | None:
        """Most tokens of prompts in the next step; None: as many as the budget allows.

        Prompts for which the steps that come anyway have no room are better computed in few steps:
        attention then reads their keys less often.

        Args:
            num_decodes: rows that decode in it.
            num_waiting: tokens of all prompts still to be computed.
            num_steps: steps that the oldest of the rows may still decode.
        """
        room = self.room(num_decodes)
        return room if num_waiting <= room * num_steps else None

    def decode_sizes(self, max_num_seqs: int) -> list[int]:
        """Numbers of rows that a step's decoding rows are padded to."""
        sizes = [0, GRAIN // 4, *range(GRAIN, max_num_seqs, GRAIN)]
        return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_steps(layer_bytes: int) -> MixedSteps | None:
    """The bound for a model whose layers have that many bytes (on one rank); None: no bound."""
    return MixedSteps() if layer_bytes >= LEAST_LAYER else None

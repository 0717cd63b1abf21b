"""Throughput against GPUs, nodes, model size and context, on paper: a replica, a cluster of them.

Owns the arithmetic and its constants. They are marked: M, measured by us, on an NVIDIA H100 80GB
HBM3 (two for the sums) unless another card is named; P, published by others; E, an estimate that a
measurement should replace.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from workload import HEAD_DIM, QWEN3, VOCAB, Workload, reference_workload


@dataclass(frozen=True)
class Card:
    """A kind of card."""

    name: str
    read: float
    """Bytes per second."""
    flops: float
    """Of bf16 products."""
    memory: float


H100 = Card("H100", 3.08e12, 735e12, 80e9)  # [M], except the memory
H200 = Card("H200", 4.2e12, 780e12, 141e9)  # [M], except the memory
PREFILL_SHARE = 0.7  # of a card's FLOPS that whole prefill steps reach [E]
ATTENTION_SHARE = 0.95  # of the read that decode attention reaches on large batches [M]
ATTENTION_FLOOR = 5.9e-6  # seconds per layer, one sequence of 1,024 tokens [M]
LAYER_EXTRA = ((1, 6.4e-6), (8, 11.2e-6), (64, 15.5e-6), (256, 25.9e-6))
"""Rows of a step: seconds per layer beyond reading its weights (0.6B; kernels_step.json) [M]."""
ALL_REDUCE = ((2 << 10, 7.1e-6), (8 << 10, 8.0e-6), (64 << 10, 8.6e-6), (256 << 10, 10.1e-6))
ALL_REDUCE_2 = (*ALL_REDUCE, (2048 << 10, 29e-6))
"""Bytes and seconds of a sum over two ranks, NCCL in a CUDA graph [M]."""
IN_NORM = (
    (8 << 10, 1.8e-6),
    (128 << 10, 1.9e-6),
    (512 << 10, 3.2e-6),
    (2 << 20, 7.1e-6),
    (8 << 20, 20.7e-6),
    (128 << 20, 304e-6),
)
"""Bytes, and seconds beyond the norm's own, of a sum over two ranks inside the norm (two H200s;
h200/all_reduce.json) [M]."""
IN_NORM_ROWS = 256  # with more than two ranks, NCCL sums larger steps
HOP = {1: 0.0, 2: 1.0, 4: 1.3, 8: 1.7}  # a sum's latency on more ranks, against two [E]
LINK = 300e9  # bytes per second of a large sum over NVLink [E]
MEMORY_SHARE = 0.9
OVERHEAD = 4e9  # bytes of a card for activations and graphs [E]

GPUS_A_NODE = 8
STORE = 100e9  # bytes per second that shared storage gives to all nodes together [E]
NETWORK = 25e9  # bytes per second into a node [E]
BATCH_ROWS = 1024
FAILURES = 419 / (54 * 24 * 16384)  # per GPU and hour: Llama 3's 54 days on 16,384 H100s [P]
RECOVERY = 45.0  # seconds until a lost replica's work runs again: 20 to notice, 25 to start [E]
ROW_BYTES = 8e3  # a prompt and its answer as text [E]

MORE = {  # layers, hidden, ffn, q heads, kv heads, tied
    "qwen3-14b": (40, 5120, 17408, 40, 8, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, False),
}


@dataclass(frozen=True)
class Replica:
    """One model in bf16 on `ranks` cards of a node."""

    model: str
    ranks: int = 1
    card: Card = H100

    @property
    def shape(self) -> tuple[int, int, int, int, int, bool]:
        return (QWEN3 | MORE)[self.model]

    @property
    def body(self) -> int:
        """Parameters of all layers."""
        layers, hidden, ffn, q_heads, kv_heads, _ = self.shape
        return layers * (hidden * HEAD_DIM * (2 * q_heads + 2 * kv_heads) + 3 * hidden * ffn)

    @property
    def head(self) -> int:
        return VOCAB * self.shape[1]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights, on all ranks together."""
        return 2 * (self.body + self.head * (1 if self.shape[5] else 2))

    @property
    def kv_token_bytes(self) -> float:
        """A token's keys and values on one rank; a head is not split."""
        layers, _, _, _, kv_heads, _ = self.shape
        return 2 * layers * max(kv_heads / self.ranks, 1) * HEAD_DIM * 2

    @property
    def room(self) -> int:
        """Tokens that the KV cache holds; negative where the weights do not fit."""
        free = MEMORY_SHARE * self.card.memory - OVERHEAD - self.resident_bytes / self.ranks
        return int(free / self.kv_token_bytes)

    def layer_sum(self, tokens: int) -> float:
        """Seconds of one of a layer's two sums over the ranks, beyond the norm's own."""
        num_bytes = tokens * self.shape[1] * 2
        if self.ranks > 2 and tokens > IN_NORM_ROWS:
            return self.all_reduce(num_bytes)
        sent = (self.ranks - 1) * num_bytes  # the whole part goes to each other rank [E beyond two]
        last_bytes, last = IN_NORM[-1]
        return between(IN_NORM, sent) + max(sent - last_bytes, 0) * last / last_bytes

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds of one sum over the ranks by NCCL."""
        last_bytes, _ = ALL_REDUCE_2[-1]
        wire = 2 * (self.ranks - 1) / self.ranks
        beyond = max(num_bytes - last_bytes, 0) * wire / LINK
        return HOP[self.ranks] * between(ALL_REDUCE_2, min(num_bytes, last_bytes)) + beyond

    def collectives(self, tokens: int, rows: int) -> float:
        """Seconds of a step's sums and of the gather of its logits."""
        if self.ranks == 1:
            return 0.0
        sums = 2 * self.shape[0] * self.layer_sum(tokens)
        return sums + self.all_reduce(rows * VOCAB * 2 / 2)  # a gather moves half as much

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a decode step; `context`: cached tokens of all its sequences together."""
        layers = self.shape[0]
        parameters = (self.body + self.head) / self.ranks
        products = max(2 * parameters / self.card.read, 2 * parameters * batch / self.card.flops)
        attention = self.kv_token_bytes * context / self.card.read / ATTENTION_SHARE
        attention = max(attention, layers * ATTENTION_FLOOR)
        return (
            products
            + attention
            + layers * between(LAYER_EXTRA, batch)
            + self.collectives(batch, batch)
        )

    def prefill(self, lens: Sequence[int], step_tokens: int = 16384) -> float:
        """Seconds for prompts of these lengths."""
        layers, _, _, q_heads, _, _ = self.shape
        tokens = sum(lens)
        pairs = sum(n * n / 2 for n in lens)
        flops = 2 * self.body * tokens + pairs * layers * q_heads * HEAD_DIM * 4
        steps = -(-tokens // step_tokens)
        sums = steps * self.collectives(min(tokens, step_tokens), len(lens) // steps)
        return flops / self.ranks / self.card.flops / PREFILL_SHARE + sums

    def seconds(self, work: Workload) -> float:
        """All prompts, then all decode steps: every sequence runs at once."""
        lens = [(len(p), out) for p, out in zip(work.prompts, work.output_lens, strict=True)]
        total = self.prefill([prompt for prompt, _ in lens])
        for step in range(1, max(work.output_lens)):
            live = [prompt + step for prompt, out in lens if out > step]
            total += self.decode(len(live), sum(live))
        return total


@dataclass(frozen=True)
class Cluster:
    """Replicas of one model over nodes of eight cards, each at the reference workload's rate."""

    replica: Replica
    nodes: int
    replica_seconds: float
    """Of the reference workload on one replica."""

    @property
    def replicas(self) -> int:
        return self.nodes * GPUS_A_NODE // self.replica.ranks

    @property
    def tokens_per_second(self) -> float:
        return self.replicas * reference_workload().num_output_tokens / self.replica_seconds

    @property
    def prompts_per_second(self) -> float:
        return self.replicas * len(reference_workload().prompts) / self.replica_seconds

    @property
    def driver_tasks_per_second(self) -> float:
        """Batches that one Ray Data driver distributes."""
        return self.prompts_per_second / BATCH_ROWS

    @property
    def batch_seconds(self) -> float:
        """Seconds of a batch on its replica, which is also the most that a lost replica loses."""
        return BATCH_ROWS * self.replica_seconds / len(reference_workload().prompts)

    @property
    def load_seconds(self) -> float:
        """Every node reads the weights from shared storage once."""
        weights = self.replica.resident_bytes
        return max(weights * self.nodes / STORE, weights / NETWORK)

    @property
    def failures_per_hour(self) -> float:
        return FAILURES * self.nodes * GPUS_A_NODE

    @property
    def lost_share(self) -> float:
        """Share of all work: a failed node loses a batch per card, and the time of a new start."""
        lost = self.batch_seconds + RECOVERY
        return self.failures_per_hour / 3600 * lost / self.nodes


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The piecewise linear function through `points`, level beyond its ends."""
    index = bisect_left([point for point, _ in points], x)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

"""Start: from an engine's options to a rank that can run steps.

Owns the plan of a start, the order in which device memory is taken, and the facts that the host
reads. Never runs a request.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import nv_kernels as nk
import torch
from nv_models import (
    CausalLM,
    ModelPlan,
    TensorParallel,
    describe,
    plan_model,
    resolve,
)
from nv_models.adapters import AdapterPool
from nv_models.config import DTYPES

from nv_engine.config import EngineConfig
from nv_engine.device.adapters import AdapterTables
from nv_engine.device.buckets import Buckets
from nv_engine.device.captured_steps import CapturedSteps
from nv_engine.device.draw_head import DrawHead
from nv_engine.device.graphs import Graphs
from nv_engine.device.memory import (
    BlockNeed,
    TableNeed,
    asked_blocks,
    available_host_memory,
    check_images,
    check_tables,
    check_weights,
    cpu_blocks,
    device_blocks,
    device_budget,
    full_step,
    peak_bytes,
)
from nv_engine.device.pool_head import PoolHead
from nv_engine.device.rendezvous import smallest
from nv_engine.device.ring import ResultRing
from nv_engine.device.runner import Runner
from nv_engine.device.sampling_tables import STOP_BYTES, SamplingTables
from nv_engine.device.slots import Slots, row_bytes
from nv_engine.device.trial import TrialSteps
from nv_engine.facts import AdapterFacts, ModelFacts, PoolingFacts
from nv_engine.log import LOGGER
from nv_engine.mixed import MixedSteps, mixed_steps
from nv_engine.pooling_params import PoolingParams

SLACK_BYTES = 512 * 2**20
"""Memory that the allocator does not count: library workspaces, fragments, nodes of graphs."""
RING_ROWS = 2
"""Rows of the result ring per sequence: a padded step has at most max_num_seqs rows of one token
and max_num_seqs rows of several."""
KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""By the option kv_cache_dtype; "auto" keeps the model's dtype, or is fp8 where the checkpoint has
scales for it."""


@dataclass(frozen=True)
class StartPlan:
    """All that follows from the options, the model's files and the machine, before a weight loads.

    Attributes:
        config: the options.
        device: where this rank computes.
        model: this rank's share of the model.
        backend: attention over this rank's heads.
        kv_dtype: of the KV cache.
        max_model_len: most tokens of a sequence, prompt and completion.
        own_model_len: the same of the model alone, whatever the options.
    """

    config: EngineConfig
    device: torch.device
    model: ModelPlan
    backend: nk.AttentionBackend
    kv_dtype: torch.dtype
    max_model_len: int
    own_model_len: int

    @property
    def parallel(self) -> TensorParallel:
        """This rank in its group."""
        return self.model.placement.parallel

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.config.kvcache_block_size)

    @property
    def block_need(self) -> BlockNeed:
        """Bytes of a block over all layers, and the blocks that max_num_seqs sequences take."""
        return BlockNeed(
            block_bytes=self.backend.kv_layout(1, self.kv_dtype).block_bytes
            * self.model.config.num_layers,
            all_sequences=self.table_width * self.config.max_num_seqs,
        )

    def facts(
        self, num_blocks: int, mixed: MixedSteps | None = None, pool: AdapterPool | None = None
    ) -> ModelFacts:
        """The facts of a runner with a KV cache of that many blocks, and a pool of adapters."""
        model = self.model.config
        eos_token_ids = model.ends(self.config.tokenizer_eos_token_ids)
        return ModelFacts(
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            block_size=self.config.kvcache_block_size,
            own_model_len=self.own_model_len,
            length_place=model.length_place,
            mixed_steps=mixed,
            num_ids=num_ids(self.config.tokenizer_num_ids, eos_token_ids, model.vocab_size),
            pooling=self._pooling,
            adapters=self._adapters(pool),
        )

    def _adapters(self, pool: AdapterPool | None) -> AdapterFacts | None:
        """The facts of a pool."""
        if pool is None:
            return None
        return AdapterFacts(
            num_slots=pool.num_slots,
            num_images=_num_images(self.config),
            max_rank=pool.max_rank,
            targets=pool.targets,
        )

    @property
    def trial_pooling(self) -> PoolingParams | None:
        """The pooling that takes the most memory: of each token; None: tokens are drawn."""
        pooler = self.model.pooler
        return None if pooler is None else PoolingParams(task=pooler.tasks[-1])

    @property
    def _pooling(self) -> PoolingFacts | None:
        """The facts of a model that pools."""
        pooler = self.model.pooler
        if pooler is None:
            return None
        return PoolingFacts(
            tasks=pooler.tasks, width=pooler.width, reads_whole_prompt=pooler.reads_whole_prompt
        )


def start_runner(config: EngineConfig, parallel: TensorParallel | None = None) -> Runner:
    """Load one rank's model and make its KV cache.

    Args:
        config: the options.
        parallel: this rank in its group; None: the only rank.

    Raises:
        ValueError: an option does not suit the model or the machine; most are refused before a
            weight is read.
    """
    plan = plan_start(config, parallel or TensorParallel())
    model = plan.model.load()
    pool = _make_pool(plan, model)
    begun = time.monotonic()
    if plan.backend.compiles:
        _compile_kernels(plan, model, pool)
    compile_seconds = time.monotonic() - begun
    own_blocks, graph_room = _count_blocks(plan, model, pool)
    num_blocks = smallest(own_blocks, plan.parallel, plan.device)
    LOGGER.info(
        "KV cache: %d blocks, %d tokens, %s",
        num_blocks,
        num_blocks * config.kvcache_block_size,
        plan.kv_dtype,
    )
    captures = plan.backend.is_capturable and not config.enforce_eager
    LOGGER.info(
        "kernels: compiled in %.1f s; CUDA graphs: %s",
        compile_seconds,
        "each captured when its step first comes" if captures else "none",
    )
    mixed = mixed_steps(plan.model.layer_bytes) if captures else None
    runner = _make_runner(plan, model, plan.facts(num_blocks, mixed, pool), pool)
    if captures:
        buckets = Buckets(config.max_num_seqs, plan.max_model_len, mixed)
        graphs, shares = Graphs(plan.device, graph_room), plan.parallel.size == 1
        captured = CapturedSteps(graphs, buckets, shares=shares)
        runner.use_graphs(captured, model.config.num_trial_layers)
    return runner


def plan_start(config: EngineConfig, parallel: TensorParallel) -> StartPlan:
    """Decide all that can be decided before a weight is read, and refuse what cannot work.

    Raises:
        ValueError: an option does not suit the model or the machine.
    """
    path = resolve(config.model, config.revision)
    model_config, pooler, files = describe(
        path,
        config.hf_overrides,
        runner=config.runner,
        convert=config.convert,
        task=config.task,
    )
    device = choose_device(config.device, parallel.rank)
    own_len = model_config.max_length
    max_len = own_len if config.max_model_len is None else min(config.max_model_len, own_len)
    _check_tables(config, device, max_len, model_config.head_dim, parallel.size)
    model = plan_model(
        path,
        device=device,
        dtype=config.dtype,
        parallel=parallel,
        load_format=config.load_format,
        arithmetic="batch_invariant" if config.deterministic else "fast",
        max_positions=max_len,
        pooler=pooler,
        files=files,
        quantization=config.quantization,
    )
    architecture, dtype = model_config.architecture, model.placement.dtype
    LOGGER.info("model: %s (%s), %s on %s", config.model, architecture, dtype, device)
    backend = _choose_backend(config, model)
    LOGGER.info("attention backend: %s (%s)", backend.name, backend.reason)
    has_scales = model.placement.scheme is not None and model.placement.scheme.has_kv_scales
    kv_name = "fp8" if has_scales and config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kv_dtype = KV_DTYPES.get(kv_name, dtype)
    plan = StartPlan(config, device, model, backend, kv_dtype, max_len, own_len)
    _check_weights(plan)
    return plan


def choose_device(name: str, rank: int) -> torch.device:
    """The device that an option names; "auto" is a CUDA card where there is one.

    Raises:
        ValueError: for a CUDA device on a machine without one, or an unknown name.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device is {name!r}: use "auto", "cuda" or "cpu"') from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f'device is {name!r}: use "auto", "cuda" or "cpu"')
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = rank if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f'device is {name!r} (rank {rank}), but there are {count} CUDA devices: use "cpu"'
        )
    return torch.device("cuda", index)


def num_ids(known: int | None, eos_token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Ids from here on are drawn only for requests that name them; None: all are.

    An EOS that the tokenizer does not know is drawn all the same: without it no text would end.
    """
    if known is None:
        return None
    end = max([known, *(token + 1 for token in eos_token_ids)])
    return end if end < vocab_size else None


def _choose_backend(config: EngineConfig, model: ModelPlan) -> nk.AttentionBackend:
    """The attention backend that the arithmetic needs; if any will do, the one of the options."""
    shape, placement = model.config, model.placement
    needed = placement.arithmetic.attention_backend
    return nk.attention_backend(
        config.attention_backend if needed == "auto" else needed,
        device=placement.device,
        dtype=placement.dtype,
        num_q_heads=len(placement.parallel.split(shape.num_q_heads, "num_attention_heads")),
        num_kv_heads=len(placement.parallel.split_kv_heads(shape.num_kv_heads)),
        head_dim=shape.head_dim,
        block_size=config.kvcache_block_size,
        specs=[layer.attention for layer in shape.layers],
    )


def _check_tables(
    config: EngineConfig, device: torch.device, max_model_len: int, head_dim: int, num_ranks: int
) -> None:
    """Refuse limits whose tables would not fit, before any table is made."""
    rope = 4 * max_model_len * head_dim  # made on the host
    row = row_bytes(-(-max_model_len // config.kvcache_block_size)) + STOP_BYTES
    ring = 8 * _num_ring_entries(config) * RING_ROWS  # and 3 lists on the host beside it
    host = TableNeed(rope, ring + 3 * 8)
    bounds = {"max_num_seqs": config.max_num_seqs, "max_model_len": max_model_len}
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        check_tables(TableNeed(rope + row, row), free, **bounds)
    else:
        host = TableNeed(host.fixed + row, host.each + row)
    check_tables(host, available_host_memory() // num_ranks, **bounds)


def _check_weights(plan: StartPlan) -> None:
    """Refuse weights, and a KV cache of a size that was asked for, that do not fit."""
    room, asked = _room(plan), plan.config.num_kvcache_blocks
    is_share = plan.device.type == "cuda" and asked == -1
    placement = plan.model.placement
    scheme = placement.scheme.name if placement.scheme else None
    weights, adapters = plan.model.num_bytes, 0
    if plan.config.enable_lora:
        adapters = plan.model.adapter_bytes(*_pool_sizes(plan.config))
    check_weights(
        weights, room, placement.dtype, is_share=is_share, scheme=scheme, adapters=adapters
    )
    if plan.config.enable_lora:
        free = available_host_memory() // plan.parallel.size
        if plan.device.type == "cpu":
            free -= weights + adapters
        check_images(_num_images(plan.config), adapters // plan.config.max_loras, free)
    if asked > 0:
        asked_blocks(asked, plan.block_need, room - weights - adapters)


def _room(plan: StartPlan) -> int:
    """Bytes that weights and KV cache may take at most."""
    if plan.device.type == "cpu":
        return available_host_memory() // plan.parallel.size
    if plan.config.num_kvcache_blocks > 0:
        return torch.cuda.mem_get_info(plan.device)[0]
    return device_budget(plan.device, plan.config.gpu_memory_utilization)


def _make_pool(plan: StartPlan, model: CausalLM) -> AdapterPool | None:
    """The slots of adapters, beside the model's weights; None if adapters are not enabled."""
    config = plan.config
    if not config.enable_lora:
        return None
    pool = AdapterPool(model, *_pool_sizes(config))
    LOGGER.info(
        "adapters: %d slots of rank %d, %.2f GiB, %s",
        *(config.max_loras, config.max_lora_rank, pool.num_bytes / 2**30, pool.dtype),
    )
    return pool


def _pool_sizes(config: EngineConfig) -> tuple[int, int, torch.dtype | None]:
    """Slots, rank and dtype of the pool of adapters."""
    return config.max_loras, config.max_lora_rank, DTYPES.get(config.lora_dtype)


def _num_images(config: EngineConfig) -> int:
    """Adapters that each rank keeps in its host's memory."""
    return config.max_cpu_loras or config.max_loras


def _compile_kernels(plan: StartPlan, model: CausalLM, pool: AdapterPool | None) -> None:
    """Compile the kernels of the usual steps in parallel, if this machine has not yet."""
    steps, runner = (
        TrialSteps(plan.config, plan.max_model_len, plan.trial_pooling),
        _make_trial_runner(plan, model, model.config.num_trial_layers, pool),
    )
    with nk.compile_ahead():
        for batch in (*steps.small(), steps.prefill()):  # the slowest to compile last
            runner.try_out(batch)


def _count_blocks(
    plan: StartPlan, model: CausalLM, pool: AdapterPool | None = None
) -> tuple[int, int]:
    """Blocks of the KV cache, and the bytes that captured steps work in (0: not measured).

    The options give the number of blocks, or this rank's memory does.
    """
    config, need, room = plan.config, plan.block_need, _room(plan)
    if config.num_kvcache_blocks > 0:
        return asked_blocks(config.num_kvcache_blocks, need, room), 0
    if plan.device.type == "cpu":
        return cpu_blocks(need, room - (pool.num_bytes if pool else 0)), 0
    gc.collect()  # an earlier engine's tensors in cycles would count, or be freed while we measure
    try:
        steps, runner = (
            TrialSteps(config, plan.max_model_len, plan.trial_pooling),
            _make_trial_runner(plan, model, model.config.num_layers, pool),
        )
        prefill = peak_bytes(plan.device, lambda: runner.try_out(steps.prefill()))
        decode = peak_bytes(plan.device, lambda: runner.try_out(steps.decode()))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            full_step(plan.device, config.max_num_batched_tokens, config.max_num_seqs)
        ) from error
    graphs = 0 if config.enforce_eager else max(prefill, decode)
    weights = torch.cuda.memory_allocated(plan.device)
    return device_blocks(need, room, weights + prefill + graphs + SLACK_BYTES), graphs


def _make_runner(
    plan: StartPlan, model: CausalLM, facts: ModelFacts, pool: AdapterPool | None
) -> Runner:
    """A runner over a KV cache of `facts.num_blocks` blocks."""
    layout = plan.backend.kv_layout(facts.num_blocks, plan.kv_dtype)
    is_fp8 = plan.kv_dtype in KV_DTYPES.values()
    scales = model.kv_scales() if is_fp8 else [(1.0, 1.0)] * model.config.num_layers
    kv_caches = [
        replace(layout.allocate(plan.device), k_scale=k_scale, v_scale=v_scale)
        for k_scale, v_scale in scales
    ]
    return _runner_over(kv_caches, plan, model, facts, _adapter_tables(plan, pool))


def _make_trial_runner(
    plan: StartPlan, model: CausalLM, num_layers: int, pool: AdapterPool | None
) -> Runner:
    """A runner of the first layers, which share a cache of one block, for the trial steps."""
    kv = plan.backend.kv_layout(1, plan.kv_dtype).allocate(plan.device)
    adapters = _adapter_tables(plan, pool, is_trial=True)
    return _runner_over([kv] * num_layers, plan, model, plan.facts(num_blocks=1), adapters)


def _adapter_tables(
    plan: StartPlan, pool: AdapterPool | None, *, is_trial: bool = False
) -> AdapterTables | None:
    """The tables of the slots' adapters, if there is a pool; trial steps load none."""
    if pool is None:
        return None
    config = plan.config
    return AdapterTables(
        pool,
        config.max_num_seqs,
        0 if is_trial else _num_images(config),
        is_batch_invariant=config.deterministic,
        is_first=plan.parallel.rank == 0,
        with_ends=(0,) if is_trial else (),
    )


def _runner_over(
    kv_caches: Sequence[nk.KVCache],
    plan: StartPlan,
    model: CausalLM,
    facts: ModelFacts,
    adapters: AdapterTables | None,
) -> Runner:
    """A runner with new slots and the head that these options ask for."""
    slots = Slots(plan.config.max_num_seqs, plan.table_width, plan.device)
    head = _head(plan, model, slots, facts)
    windows = plan.model.config.windows
    return Runner(
        model,
        plan.backend,
        kv_caches,
        slots,
        head,
        facts=facts,
        windows=windows,
        adapters=adapters,
    )


def _head(plan: StartPlan, model: CausalLM, slots: Slots, facts: ModelFacts) -> DrawHead | PoolHead:
    if facts.pooling is None:
        return _draw_head(plan, model, slots, facts)
    return PoolHead(model.pooler, plan.config.max_num_seqs, plan.device)


def _draw_head(plan: StartPlan, model: CausalLM, slots: Slots, facts: ModelFacts) -> DrawHead:
    tables = SamplingTables(
        slots.tables, facts.vocab_size, facts.eos_token_ids, num_ids=facts.num_ids
    )
    return DrawHead(model.logits, tables, _make_ring(plan))


def _make_ring(plan: StartPlan) -> ResultRing:
    """A ring in which no entry is overwritten before it is read."""
    num_rows = RING_ROWS * plan.config.max_num_seqs
    return ResultRing(_num_ring_entries(plan.config), num_rows, plan.device)


def _num_ring_entries(config: EngineConfig) -> int:
    """Entries of the ring: a capture in each batch may cost one."""
    return (config.max_in_flight + 2) * (config.max_burst + 1)

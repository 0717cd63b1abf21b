"""The CPU's backends against the definition, and the definition against dense float64 attention."""

import itertools
from functools import partial

import nv_kernels as nk
import pytest
import torch
from nv_kernels.attention import cpp as cpu
from nv_kernels.attention.batch_invariant_torch import BatchInvariantTorchAttention
from nv_kernels.attention.causal_mask import ALIGNMENT
from torch.nn.functional import scaled_dot_product_attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# (query_len, context_len) per sequence; one-query rows come first, as in a step.
RAGGED = {
    "one": [(1, 1)],
    "empty rows": [(1, 0), (1, 5), (0, 0), (1, 0)],
    "block edges": [(1, 15), (1, 16), (1, 17), (1, 32), (1, 33)],
    "one long row": [(1, 3), (1, 700), (1, 2), (1, 41)],
    "prompts": [(16, 16), (1, 1), (33, 33), (2, 2)],
    "prefix hits": [(7, 39), (1, 17), (300, 348), (16, 32)],
    "mixed": [(1, 0), (1, 64), (1, 9), (5, 5), (0, 0), (21, 37), (4, 0)],
    "all empty": [(1, 0), (0, 0)],
}


def paged(backend, lengths, dtype, kv_dtype=None, seed=0):
    """A step: blocks in random order, tables wider than needed, stale blocks full of NaN."""
    torch.manual_seed(seed)
    shape = backend.shape
    block_size = shape.block_size
    needed = [-(-context // block_size) for _, context in lengths]
    width = max(needed) + 2
    num_blocks = sum(needed) + 3
    layout = backend.kv_layout(num_blocks, kv_dtype or dtype)
    kv = layout.allocate("cpu")
    kv = nk.KVCache(kv.k, kv.v, 0.5, 2.0) if kv_dtype else kv
    kv.k.view(torch.uint8).fill_(0xFF)  # NaN in every float type
    kv.v.view(torch.uint8).fill_(0xFF)
    order = iter(torch.randperm(num_blocks).tolist())
    tables = torch.full((len(lengths), width), 10**6, dtype=torch.int32)
    for row, ((_, context), count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = torch.tensor(list(itertools.islice(order, count)), dtype=torch.int32)
        tables[row, :count] = blocks
        places = torch.arange(context)
        slots = blocks[places // block_size].long() * block_size + places % block_size
        new = torch.randn(2, context, shape.num_kv_heads, shape.head_dim).to(dtype)
        nk.store_kv(new[0], new[1], kv, slots)
    starts = list(itertools.accumulate((query for query, _ in lengths), initial=0))
    metadata = nk.AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(query for query, _ in lengths) + 3,
        max_context_len=max(context for _, context in lengths) + 100,
        num_decodes=len(list(itertools.takewhile(lambda pair: pair[0] == 1, lengths))),
    )
    q = torch.randn(starts[-1], shape.num_q_heads, shape.head_dim).to(dtype)
    return q, kv, metadata


def backend_of(name, dtype, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16):
    return nk.attention_backend(
        name,
        device="cpu",
        dtype=dtype,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )


@pytest.fixture(params=[True, False], ids=["compiled", "without a compiler"])
def compiled(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(cpu, "kernel", lambda *_: None)


@pytest.fixture(params=["torch", "batch_invariant", "batch_invariant without a compiler"])
def backend_for(request, monkeypatch):
    name, _, without = request.param.partition(" without ")
    if without:
        monkeypatch.setattr(cpu, "kernel", lambda *_: None)
    return partial(backend_of, name)


def test_batch_invariant_needs_no_compiler(monkeypatch):
    monkeypatch.setattr(cpu, "kernel", lambda *_: None)
    backend = backend_of("batch_invariant", torch.float32)
    assert isinstance(backend, BatchInvariantTorchAttention)


def check(backend, lengths, dtype, kv_dtype=None):
    q, kv, metadata = paged(backend, lengths, dtype, kv_dtype)
    spec = nk.AttentionSpec(backend.shape.head_dim**-0.5)
    out = backend.attend(q, kv, metadata, backend.plan(metadata)[None], spec)
    expected = nk.reference.attention(q, kv, metadata, spec)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert not out.isnan().any()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    return q, kv, metadata, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged(backend_for, name, dtype):
    check(backend_for(dtype), RAGGED[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(backend_for, head_dim, dtype):
    check(backend_for(dtype, head_dim=head_dim), [(1, 20), (1, 37), (9, 30)], dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_group_sizes(backend_for, group, num_kv_heads):
    backend = backend_for(torch.float32, group * num_kv_heads, num_kv_heads)
    check(backend, [(1, 20), (1, 37), (9, 30)], torch.float32)


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_block_sizes(backend_for, block_size):
    edges = [(1, block_size - 1), (1, block_size), (1, block_size + 1)]
    check(
        backend_for(torch.float32, block_size=block_size),
        [*edges, (block_size, block_size + 1)],
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_cache(backend_for, dtype):
    lengths = [(1, 20), (1, 37), (1, 1), (9, 30)]
    check(backend_for(dtype), lengths, dtype, torch.float8_e4m3fn)


def test_empty_rows_are_zero(backend_for):
    _, _, metadata, out = check(backend_for(torch.float32), RAGGED["mixed"], torch.float32)
    starts = metadata.query_start.tolist()
    for row, (_, context) in enumerate(RAGGED["mixed"]):
        rows = out[starts[row] : starts[row + 1]]
        assert bool((rows == 0).all()) == (context == 0)


def test_padding_rows_after_the_last_sequence_are_zero(backend_for):
    backend = backend_for(torch.float32)
    q, kv, metadata = paged(backend, [(1, 5), (3, 4)], torch.float32)
    q = torch.cat((q, torch.randn(2, *q.shape[1:])))
    out = backend.attend(q, kv, metadata, backend.plan(metadata)[None], nk.AttentionSpec(0.1))
    assert (out[4:] == 0).all()
    assert (out[:4] != 0).any(-1).all()


def test_groups_are_few_and_consecutive_blocks_are_not_copied():
    backend = backend_of("torch", torch.float32)
    _, _, metadata = paged(backend, [(1, 100)] * 30 + [(1, 3000), (1, 10)], torch.float32)
    plan = backend.plan(metadata)[None]
    assert [part.rows.stop - part.rows.start for part in plan.decodes] == [1, 31]
    tables = torch.arange(200, dtype=torch.int32)[None]
    alone = nk.AttentionMetadata(torch.tensor([0, 1]), torch.tensor([3000]), tables + 7, 1, 3000, 1)
    (part,) = backend.plan(alone)[None].decodes
    assert part.slots == slice(7 * 16, 7 * 16 + 3000)
    assert part.mask is None


def assert_aligned(mask):
    """Whether SDPA's CUDA kernel can read a mask: 16 bytes at once, at strides torch accepts."""
    assert mask.data_ptr() % 16 == 0
    assert mask.stride(-1) == 1
    assert all(stride % ALIGNMENT == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((4, 2), 32), ((3, 3), 8)])
def test_a_cuda_context_survives_since_masks_are_aligned(monkeypatch, heads, head_dim, dtype, seed):
    masks = []

    def attend(*args, attn_mask, **options):
        masks.extend([] if attn_mask is None else [attn_mask])
        return scaled_dot_product_attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr("nv_kernels.attention.torch.scaled_dot_product_attention", attend)
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, 301, (13,), generator=generator).tolist()
    prompts = [(context, context) for context in contexts]
    decodes = [(1, context) for context in contexts]
    chunks = [(1 + context // 3, context) for context in contexts]
    pair = [(96, 96), (93, 93)]
    for lengths in (prompts, decodes, decodes + chunks, pair, [(700, 813)]):
        masks.clear()
        check(backend_of("torch", dtype, *heads, head_dim), lengths, dtype)
        assert masks
        for mask in masks:
            assert_aligned(mask)


def test_definition_is_dense_causal_attention():
    """Plain float64 attention over contiguous keys, written out for one head."""
    backend = backend_of("torch", torch.float64, 2, 1, 8)
    q, kv, metadata = paged(backend, [(3, 20)], torch.float64)
    blocks = metadata.block_tables[0, :2].long()
    k, v = (cache[blocks].flatten(0, 1)[:20, 0] for cache in (kv.k, kv.v))
    out = nk.reference.attention(q, kv, metadata, nk.AttentionSpec(0.3))
    for row, head in itertools.product(range(3), range(2)):
        seen = 20 - 3 + row + 1
        weights = torch.exp(k[:seen] @ q[row, head] * 0.3)
        expected = weights @ v[:seen] / weights.sum()
        torch.testing.assert_close(out[row, head], expected)


def test_other_layouts_are_refused():
    backend = backend_of("torch", torch.float32)
    q, _, metadata = paged(backend, [(1, 5)], torch.float32)
    foreign = nk.KVLayout(4, 16, 2, 64, torch.float32, "HND").allocate("cpu")
    with pytest.raises(RuntimeError, match="view"):
        backend.attend(q, foreign, metadata, backend.plan(metadata)[None], nk.AttentionSpec(1.0))


CONTEXTS = [700, 41, 128, 1, 300, 129]


def some_rows(metadata, rows):
    """The step in which sequence i computes rows[i] = (query_len, context_len), or nothing."""
    starts = list(itertools.accumulate((query for query, _ in rows), initial=0))
    return nk.AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in rows], dtype=torch.int32),
        metadata.block_tables,
        max(query for query, _ in rows),
        max(context for _, context in rows),
        len(list(itertools.takewhile(lambda pair: pair[0] == 1, rows))),
    )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "heads", "head_dim", "block_size"),
    [
        (torch.float32, None, (9, 3), 64, 16),
        (torch.float32, None, (4, 2), 80, 256),
        (torch.bfloat16, None, (4, 4), 128, 64),
        (torch.bfloat16, torch.float8_e4m3fn, (8, 1), 16, 32),
        (torch.float32, None, (6, 2), 10, 16),  # no compiled kernel supports this
    ],
)
def test_a_token_s_bits_do_not_depend_on_the_step(
    dtype, kv_dtype, heads, head_dim, block_size, num_threads
):
    """A token alone, in a batch and in a chunk of any length has the bits it has in one prompt."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    backend = backend_of("batch_invariant", dtype, *heads, head_dim, block_size)
    q, kv, whole = paged(backend, [(c, c) for c in CONTEXTS], dtype, kv_dtype)
    expected = backend.attend(q, kv, whole, backend.plan(whole)[None], nk.AttentionSpec(0.1)).split(
        CONTEXTS
    )
    generator = torch.Generator().manual_seed(5)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    steps = [[(1, context) for context in CONTEXTS]]
    for _ in range(8):
        ends = [draw(1, context) for context in CONTEXTS]
        chosen = draw(0, len(CONTEXTS) - 1)
        steps += [
            [(draw(1, end), end) for end in ends],
            [(1, end) for end in ends],
            [(1, end) if i == chosen else (0, 0) for i, end in enumerate(ends)],
            [(draw(1, end), end) if i == chosen else (0, 0) for i, end in enumerate(ends)],
        ]
    for rows in steps:
        step = some_rows(whole, rows)
        parts = zip(q.split(CONTEXTS), rows, strict=True)
        queries = torch.cat([part[end - query : end] for part, (query, end) in parts])
        out = backend.attend(queries, kv, step, backend.plan(step)[None], nk.AttentionSpec(0.1))
        for got, want, (query, end) in zip(
            out.split([query for query, _ in rows]), expected, rows, strict=True
        ):
            assert torch.equal(got, want[end - query : end]), (rows, query, end)
    torch.set_num_threads(before)

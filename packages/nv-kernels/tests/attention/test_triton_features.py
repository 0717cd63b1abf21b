"""A window, a softcap and sinks in the kernels of a card: in the interpreter, and on a card."""

from dataclasses import replace

import pytest
import torch
from attention_cases import FEATURES, assert_attends, step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.backend import TritonAttention
from nv_kernels.attention.triton.batch_invariant import BatchInvariantTritonAttention

BACKENDS = [TritonAttention, BatchInvariantTritonAttention]
DECODES = [(1, 130), (1, 1), (1, 64), (1, 0), (1, 65)]
CHUNKS = [(5, 5), (3, 70), (0, 0), (40, 131)]
# Groups, block sizes (smaller than a tile, as large, larger) and caches.
OPTIONS = [
    {"heads": (2, 2), "block_size": 64},
    {"heads": (4, 2), "block_size": 16, "padding": 70},
    {"heads": (6, 2), "block_size": 128, "fp8": True, "order": "HND"},
]
CASES = [(name, OPTIONS[index % 3]) for index, name in enumerate(FEATURES)]
CASES += [("all", options) for options in OPTIONS if ("all", options) not in CASES]


def check(backend, features, rows, **options):
    case = step(rows, device=DEVICE, **options).with_features(**features)
    made = backend(case.shape, "a test")
    assert made.refusal(case.spec) is None
    assert_attends(case.attend(made), case.expected())


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_all_kinds_of_rows(backend, name, options):
    check(backend, FEATURES[name], DECODES + CHUNKS, **options)


@on_device
def test_a_softcap_in_fp32():
    """The backend that takes fp32; its bounds are those of fp32, so the tanh must be exact too."""
    features = FEATURES["softcap"]
    check(BatchInvariantTritonAttention, features, [(1, 65), (9, 70)], dtype=torch.float32)


@on_device
@pytest.mark.parametrize("features", ["sinks", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_of_many_pieces(backend, features):
    """All processors share one row: its pieces, or spread splits, are merged."""
    features = FEATURES[features]
    if features.get("window"):
        features = features | {"window": 300}
    check(backend, features, [(1, 700)], heads=(3, 1), block_size=64, bounds=(1, 1024))


@on_device
def test_a_window_s_pieces_are_those_of_contexts_as_long_as_the_window():
    """Two rows of 2,048 and 70 tokens with a window of 256 have work as if of 256 and 70."""

    def pieces(contexts, window):
        case = step([(1, 1)] * 2, device=DEVICE, block_size=16, bounds=(1, 4096))
        case.metadata.context_lens.copy_(torch.tensor(contexts))
        tables = torch.zeros(2, 200, dtype=torch.int32, device=DEVICE)
        metadata = replace(case.metadata, block_tables=tables)
        plan = TritonAttention(case.shape, "a test").plan(metadata, [window])[window].decode
        records = plan.records.view(-1, 8)[: plan.num_pieces].tolist()
        return plan.settings.tile, [record for record in records if record[0] >= 0]

    tile, found = pieces([2048, 70], 256)
    _, expected = pieces([256, 70], None)
    assert [(item, count) for item, _, count, *_ in found] == [
        (item, count) for item, _, count, *_ in expected
    ]
    skipped = {item: (2048 - 256) // tile if item < 2 else 0 for item in range(4)}
    assert [first - skipped[item] for item, first, *_ in found] == [
        first for _, first, *_ in expected
    ]


@on_device
@pytest.mark.parametrize(
    ("backend", "keys_first", "block_size"),
    [
        (TritonAttention, False, 16),
        (TritonAttention, True, 64),
        (TritonAttention, True, 128),
        (BatchInvariantTritonAttention, None, 16),
        (BatchInvariantTritonAttention, None, 128),
    ],
)
def test_a_window_never_reads_the_keys_before_it(backend, keys_first, block_size, monkeypatch):
    plain = settings.decode_settings

    def chosen(shape, num_rows):
        return replace(plain(shape, num_rows), keys_first=keys_first)

    monkeypatch.setattr(settings, "decode_settings", chosen)
    case = step([(1, 200), (1, 140), (1, 137), (20, 185)], device=DEVICE, block_size=block_size)
    case = case.with_features(window=33)
    expected = case.expected()
    case.forget_unread()
    assert_attends(case.attend(backend(case.shape, "a test")), expected)


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_several_windows_do_not_disturb_each_other(backend):
    case = step([*DECODES, (9, 70)], device=DEVICE, block_size=64)
    made = backend(case.shape, "a test")
    plans = made.plan(case.metadata, (None, 40))
    for window, plan in plans.items():
        layer = case.with_features(window=window)
        out = made.attend(layer.q, layer.kv, layer.metadata, plan, layer.spec)
        assert_attends(out, layer.expected())
    assert plans[None].prefill is plans[40].prefill, "the tiles of a chunk know no window"


@on_device
def test_a_window_that_hides_no_key_is_none():
    """If it is as long as the bound on contexts, the layer is computed as one without a window."""
    case = step([(1, 65)], device=DEVICE, bounds=(1, 130))
    backend = TritonAttention(case.shape, "a test")
    plans = backend.plan(case.metadata, (129, None, 130))
    assert [plan.window for plan in plans.values()] == [129, None, None]
    assert plans[130].decode is plans[None].decode, "one launch for both"
    assert_attends(case.with_features(window=130).attend(backend), case.expected())


@on_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_in_fp32_far_below_and_above_the_scores(backend):
    case = step([(1, 65), (1, 0), (9, 30)], device=DEVICE, head_dim=80, heads=(3, 1))
    case = case.with_features(sinks=True)
    case = replace(case, sinks=torch.tensor([-200.0, 0.3, 9.0], device=DEVICE))
    assert_attends(case.attend(backend(case.shape, "a test")), case.expected())


on_card = pytest.mark.gpu
LONG = [(1, 3000), (1, 517), (300, 1300), (1000, 1000), (129, 4000), (17, 17), (1, 1), (2, 2049)]


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (64, 8)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows(backend, fp8, heads, features):
    """Gemma's and gpt-oss's groups, and windows of their size."""
    if features.get("window") == 1000:
        features = features | {"window": 1024}
    options = {"fp8": fp8, "order": "HND" if fp8 else "NHD", "block_size": 256}
    check(backend, features, LONG, heads=heads, head_dim=128, padding=100, **options)


@on_card
@pytest.mark.skipif(INTERPRETING, reason="graphs need a card")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_of_two_windows_reads_lengths_on_the_device(backend):
    rows = [(1, 900), (1, 1100), (1, 200), (200, 1200), (64, 64)]
    options = {"device": DEVICE, "heads": (8, 4), "head_dim": 128, "bounds": (512, 4096)}
    case = step(rows, **options)
    made = backend(case.shape, "a test")
    layers = [case.with_features(**FEATURES["all"]), case.with_features(softcap=2.0)]

    def run():
        plans = made.plan(case.metadata, [layer.spec.window for layer in layers])
        return [
            made.attend(
                case.q, case.kv, case.metadata, plans[layer.spec.window], layer.spec,
                sinks=layer.sinks,
            )
            for layer in layers
        ]  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for shorter in (0, 37):
        case.metadata.context_lens[:2] -= shorter
        graph.replay()
        for out, layer in zip(outs, layers, strict=True):
            assert_attends(out, layer.expected())

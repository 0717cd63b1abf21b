"""Batches of rows, alone and in a Ray Data job that loses a node."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from nv_api import LLM, PoolingParams, SamplingParams

ray = pytest.importorskip("ray")  # in the package's test group; not on every machine with cards

from nv_api.ray import NvPooler, NvPredictor  # noqa: E402
from nv_api.start import start  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": 128}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return NvPredictor(checkpoint, sampling_params=GREEDY, **OPTIONS)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


def said(llm, prompts, **changes):
    """The outputs of generate, as lists of columns."""
    outputs = llm.generate(prompts, SamplingParams(**GREEDY | changes), use_tqdm=False)
    return [
        (o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs
    ]


def columns(batch):
    names = ("generated_text", "generated_token_ids", "finish_reason")
    return list(zip(*(batch[name].tolist() for name in names), strict=True))


def objects(*values):
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def test_rows_keep_their_columns_and_their_order(predictor, llm):
    prompts = ["hello", "a", " world " * 9]
    batch = predictor({"prompt": np.array(prompts), "id": np.array([7, 5, 6])})
    assert batch["id"].tolist() == [7, 5, 6]
    assert batch["prompt"].tolist() == prompts
    assert columns(batch) == said(llm, prompts)
    assert batch["error"].tolist() == [None] * 3


def test_token_ids_and_conversations(predictor, llm):
    ids = objects(np.array([72, 5]), np.array([9, 8, 7]))
    assert columns(predictor({"prompt_token_ids": ids})) == said(llm, [[72, 5], [9, 8, 7]])
    conversation = [{"role": "user", "content": "hello"}]
    batch = predictor({"messages": objects(np.array(conversation))})
    answer = llm.chat(conversation, SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0]
    assert columns(batch) == [(answer.text, answer.token_ids, "length")]


def test_a_row_has_parameters_of_its_own_as_columns_bring_them(predictor, llm):
    """Columns turn whole numbers into floats, absent fields into null and keys into names."""
    own = objects(
        {"max_tokens": 3.0, "temperature": None, "stop": None},
        {"max_tokens": float("nan"), "logit_bias": {"65": 100.0, "66": None}},
        None,
    )
    batch = predictor({"prompt": np.array(["hello"] * 3), "sampling_params": own})
    assert columns(batch)[0] == said(llm, ["hello"], max_tokens=3)[0]
    assert batch["generated_token_ids"][1] == [65] * 8
    assert columns(batch)[2] == said(llm, ["hello"])[0]


def test_a_row_that_is_not_a_request_is_reported_and_stops_no_other(predictor, llm):
    prompts = objects("hello", "", "x" * 500, None, "a", "b", "c")
    own = objects(None, None, None, None, {"top_p": 7}, {"top_q": 1}, {"n": 2})
    batch = predictor({"prompt": prompts, "sampling_params": own})
    assert columns(batch)[0] == said(llm, ["hello"])[0]
    assert columns(batch)[1:] == [(None, None, "error")] * 6
    errors = batch["error"].tolist()
    words = ["is empty", "128", "0 prompts", "top_p is 7", "unknown field 'top_q'", "n is 2"]
    assert errors[0] is None
    for error, word in zip(errors[1:], words, strict=True):
        assert word in error


def test_what_is_wrong_for_all_rows_is_raised(predictor, checkpoint):
    with pytest.raises(ValueError, match="the columns are text: one must be prompt or"):
        predictor({"text": np.array(["hello"])})
    with pytest.raises(TypeError, match="batch_format"):
        predictor(["hello"])
    with pytest.raises(ValueError, match="n is 2"):
        NvPredictor(checkpoint, sampling_params={"n": 2}, **OPTIONS)


def test_an_engine_whose_device_fails_is_started_again_once(checkpoint, llm, monkeypatch):
    predictor = NvPredictor(checkpoint, sampling_params=GREEDY, **OPTIONS)

    def fail(batch):
        raise RuntimeError("fell off the bus")

    first = predictor._started
    first.session._engine.executor.submit = fail
    prompts = ["hello", "", "a"]
    with pytest.warns(UserWarning, match="2 completions ended .*fell off the bus"):
        batch = predictor({"prompt": objects(*prompts)})
    assert predictor._started is not first
    assert columns(batch)[::2] == said(llm, ["hello", "a"])
    assert columns(batch)[1] == (None, None, "error")

    def started_broken():
        broken = start(checkpoint, OPTIONS)
        broken.session._engine.executor.submit = fail
        return broken

    monkeypatch.setattr(predictor, "_start", started_broken)
    predictor._started.session._engine.executor.submit = fail
    with (
        pytest.warns(UserWarning, match="1 completion ended .*fell off the bus"),
        pytest.raises(RuntimeError, match=r"failed twice: .*fell off the bus"),
    ):
        predictor({"prompt": objects("hello")})


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    monkeypatch.delitem(sys.modules, "nv_api.ray")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "nv-api\[ray\]"'):
        __import__("nv_api.ray")


NODE = {"object_store_memory": 80 * 2**20}
NUM_ROWS = 30
JOB_SECONDS = 360
"""Most of it is for a busy machine: beside six processes on two cores the job took 280 s."""


@contextmanager
def job_limit(cluster, folder, found):
    """Fails a job of Ray's that does not end: Ray waits without end for workers that cannot start.

    The sentence gives the rows in `found`, the engines that have written to `folder`, and the logs.
    """

    def fail(*_):
        pytest.fail(
            f"the Ray Data job did not end in {JOB_SECONDS} s: {len(found)} of {NUM_ROWS} rows "
            f"came and {len(list(folder.iterdir()))} engines started (2 at first, a third after "
            f"the loss); Ray's logs are in {cluster.head_node.get_logs_dir_path()}"
        )

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(JOB_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Slow(NvPredictor):
    """Says where it starts, begins when two have started, and takes its time.

    Its rows are also pooled, by an NvPooler in the same actor: to start others takes seconds.
    """

    def __init__(self, model, folder, **options):
        super().__init__(model, **options)
        del options["sampling_params"]
        self._pooler = NvPooler(model, pooling_task="embed", runner="pooling", **options)
        self._folder = Path(folder)
        node = ray.get_runtime_context().get_node_id()
        (self._folder / f"{node}.{os.getpid()}").touch()

    def __call__(self, batch):
        while len(list(self._folder.iterdir())) < 2:
            time.sleep(0.05)
        time.sleep(0.3)
        place = np.full(len(batch["id"]), os.getpid())
        return self._pooler(super().__call__(batch)) | {"process": place}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")  # a lost node is given up in 5 s, not
    monkeypatch.setenv("RAY_health_check_failure_threshold", "5")  # in 20
    head = NODE | {"num_cpus": 3, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.second = cluster.add_node(num_cpus=1, **NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
def test_a_node_is_lost_and_no_prompt_with_it(cluster, checkpoint, llm, tmp_path):
    """Completed and pooled, each row once and in order, by three actors in all."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    prompts = [f"hello {number * 7}" for number in range(NUM_ROWS)]
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)]
    options = OPTIONS | {"folder": str(tmp_path), "sampling_params": GREEDY}
    answered = ray.data.from_items(rows, override_num_blocks=NUM_ROWS // 3).map_batches(
        Slow,
        fn_constructor_kwargs=options | {"model": checkpoint},
        batch_size=3,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    found = []
    with job_limit(cluster, tmp_path, found):
        told = iter(answered.iter_rows())
        found.append(next(told))
        nodes = {path.name.split(".")[0] for path in tmp_path.iterdir()}
        assert nodes == {node["NodeID"] for node in ray.nodes()}
        cluster.remove_node(cluster.second, allow_graceful=False)
        found.extend(told)
    assert [row["id"] for row in found] == list(range(NUM_ROWS))
    assert [row["prompt"] for row in found] == prompts
    assert columns(
        {name: np.array([r[name] for r in found], dtype=object) for name in found[0]}
    ) == (said(llm, prompts))
    assert len(list(tmp_path.iterdir())) >= 3  # its work was done again, elsewhere
    assert len({row["process"] for row in found}) >= 2
    assert [row["error"] for row in found] == [None] * NUM_ROWS
    with LLM(checkpoint, runner="pooling", **OPTIONS) as embedder:
        for row, output in zip(found, embedder.embed(prompts, use_tqdm=False), strict=True):
            assert row["pooled"] == pytest.approx(output.outputs.embedding, abs=1e-6)


@pytest.fixture(scope="module")
def pooler(checkpoint):
    return NvPooler(checkpoint, pooling_task="embed", runner="pooling", **OPTIONS)


def test_rows_are_pooled(pooler, checkpoint):
    """Each row has its embedding, by its own parameters, or its error; the others do not mind."""
    rows = {
        "prompt": objects("hello", "hello", "", "x" * 500, "a", "b"),
        "pooling_params": objects(None, {"dimensions": 4.0, "normalize": False}, None, None,
                                  {"dimensions": 0.0}, {"zzz": 1}),
    }  # fmt: skip
    batch = pooler(rows)
    with LLM(checkpoint, runner="pooling", **OPTIONS) as llm:
        params = [PoolingParams(), PoolingParams(dimensions=4, normalize=False)]
        want = [o.outputs.embedding for o in llm.embed(["hello"] * 2, params, use_tqdm=False)]
    assert batch["error"].tolist()[:2] == [None, None]
    for found, each in zip(batch["pooled"][:2], want, strict=True):
        assert found == pytest.approx(each, abs=1e-6)
    assert batch["pooled"].tolist()[2:] == [None] * 4
    words = ["is empty", "500 tokens", "dimensions is 0", "no option 'zzz'"]
    for error, word in zip(batch["error"][2:], words, strict=True):
        assert word in error


def test_a_pooler_whose_device_fails_is_started_again_once(pooler):
    def fail(batch):
        raise RuntimeError("fell off the bus")

    first = pooler._started
    first.session._engine.executor.submit = fail
    with pytest.warns(UserWarning, match="1 completion ended .*fell off the bus"):
        batch = pooler({"prompt": objects("hello")})
    assert pooler._started is not first
    assert (batch["error"].tolist(), len(batch["pooled"][0])) == ([None], 64)

    class Broken(NvPooler):
        """One whose new engine fails too."""

        def _start(self):
            started = super()._start()
            started.session._engine.executor.submit = fail
            return started

    pooler.__class__ = Broken
    pooler._started.session._engine.executor.submit = fail
    with (
        pytest.warns(UserWarning, match="1 completion ended .*fell off the bus"),
        pytest.raises(RuntimeError, match=r"failed twice: .*fell off the bus"),
    ):
        pooler({"prompt": objects("hello")})


def test_rows_that_fail_alone_keep_the_engine(predictor, monkeypatch):
    """NaN in a row's logits is not a device failure: the row is not run again."""
    started, submit = predictor._started, predictor._started.session._engine.executor.submit

    def without_token(batch):
        return NoToken(submit(batch).result())

    monkeypatch.setattr(started.session._engine.executor, "submit", without_token)
    with pytest.warns(UserWarning, match="1 completion ended .*NaN"):
        batch = predictor({"prompt": objects("hello")})
    assert predictor._started is started
    assert batch["finish_reason"].tolist() == ["error"]
    assert "NaN" in batch["error"][0]


class NoToken:
    """A step whose rows drew no token."""

    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result._replace(token_ids=[[-1] * len(s) for s in self._result.token_ids])


def test_a_row_s_other_spelling_wins(checkpoint):
    """`normalize` and `use_activation` are one field, also between a row and the constructor."""
    pooler = NvPooler(
        checkpoint, pooling_task="embed", pooling_params={"normalize": True},
        runner="pooling", **OPTIONS,
    )  # fmt: skip
    own = objects({"normalize": False}, {"use_activation": False}, None)
    batch = pooler({"prompt": objects(*["hello"] * 3), "pooling_params": own})
    assert batch["error"].tolist() == [None] * 3
    first, second, third = (np.linalg.norm(each) for each in batch["pooled"])
    assert first == pytest.approx(second)
    assert abs(first - 1) > 0.01
    assert third == pytest.approx(1, abs=1e-5)


def test_a_pooler_needs_a_model_that_pools(checkpoint):
    with pytest.raises(ValueError, match="does not pool"):
        NvPooler(checkpoint, pooling_task="embed", **OPTIONS)
    with pytest.raises(ValueError, match="encode needs a task"):
        NvPooler(checkpoint, runner="pooling", **OPTIONS)

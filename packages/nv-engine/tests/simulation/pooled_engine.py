"""An engine that pools over the fake device: a result is a hash of all that it was made of."""

from struct import Struct

from fake_executor import FakeExecutor
from fake_model import next_cell
from nv_engine.batch import PooledRows, StepResult
from nv_engine.facts import PoolingFacts
from nv_engine.request import EngineRequest
from simulated_engine import Simulation

VALUE = Struct("<q")
TASKS = ("embed", "token_embed")


def pooled_of(cells, first=None):
    """The result of a prompt, or those of its tokens from `first` on."""
    firsts = [len(cells) - 1] if first is None else range(first, len(cells))
    values = [hash(tuple(cells[: place + 1])) for place in firsts]
    return PooledRows(1, b"".join(map(VALUE.pack, values)))


def truth(prompt, params):
    """The result of one prompt when it has a device of its own."""
    cells, cell = [], 0
    for token in prompt:
        cell = next_cell(cell, token)
        cells.append(cell)
    return pooled_of(cells, 0 if params.is_of_tokens else None)


class PoolingExecutor(FakeExecutor):
    """Gives results in place of tokens; those made of a whole prompt need all of it computed."""

    def _result(self, batch):
        pooled = {}
        for chunk in batch.chunks:
            assert chunk.token_ids, "nothing is drawn, so nothing is read from a slot"
            row = self.rows[chunk.slot]
            is_of_tokens = row.pooling.is_of_tokens
            if is_of_tokens or self.facts.pooling.reads_whole_prompt:
                assert row.length is not None or chunk.start == 0, "a cached token is not computed"
            self._compute(chunk)
            assert chunk.samples == (row.length == len(row.prompt))
            if is_of_tokens:
                pooled[chunk.slot] = pooled_of(self._read(row, row.length), chunk.start)
            elif chunk.samples:
                pooled[chunk.slot] = pooled_of(self._read(row, row.length))
        return StepResult([], pooled=pooled)


class PoolingSimulation(Simulation):
    """As `Simulation`, for an engine that pools."""

    make_executor = PoolingExecutor

    def __init__(self, *, reads_whole_prompt=False, **options):
        facts = PoolingFacts(tasks=TASKS, width=1, reads_whole_prompt=reads_whole_prompt)
        super().__init__(pooling=facts, **options)
        self.results, self.cached = {}, {}

    def add(self, prompt, params, salt=None):
        request_id = self.engine.add(EngineRequest(prompt, params, cache_salt=salt))
        self.salts[request_id] = salt
        self.requests[request_id] = (list(prompt), params)
        return request_id

    def take(self, updates):
        for update in updates:
            assert update.request_id not in self.finished, "an update after the last"
            assert not update.token_ids
            self.finished[update.request_id] = update.finish_reason
            self.results[update.request_id] = update.pooled
            self.cached[update.request_id] = update.num_cached_tokens

    def check(self):
        """Every result is the truth, and nothing is held."""
        assert self.finished.keys() == self.requests.keys(), "a request was lost"
        for request_id, (prompt, params) in self.requests.items():
            if self.finished[request_id] == "stop":
                assert self.results[request_id] == truth(prompt, params)
            else:
                assert self.finished[request_id] in ("abort", "error")
                assert self.results[request_id] is None
        assert self.engine.metrics.num_generated_tokens == 0
        self.check_idle()

"""An engine over the fake device, held against the truth."""

from itertools import islice

from fake_executor import FakeExecutor
from fake_model import EOS, VOCAB, said_of, truth
from nv_engine.adapter import Adapter, AdapterSource
from nv_engine.config import EngineConfig
from nv_engine.engine import Engine
from nv_engine.facts import AdapterFacts, ModelFacts
from nv_engine.lora_request import LoRARequest
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from nv_engine.scheduling.draw_key import draw_key
from nv_models.adapters import AdapterTargets


class FakeLibrary:
    """Adapters whose name is their number; the digest comes after some waits."""

    def __init__(self):
        self.known = {}
        self.unread = []
        self.num_waits = 0
        self.delay = 0

    def find(self, request):
        if request.lora_int_id not in self.known:
            source = AdapterSource(1000 + len(self.known), request.lora_name, "folder", ())
            adapter = self.known[request.lora_int_id] = Adapter(source)
            self.unread.append((self.num_waits + self.delay, adapter))
            self.tick(0)
        return self.known[request.lora_int_id]

    def tick(self, count=1):
        self.num_waits += count
        for when, adapter in self.unread:
            if when <= self.num_waits:
                adapter.digest = adapter.source.name.encode()
        self.unread = [each for each in self.unread if each[0] > self.num_waits]

    def wait(self, seconds):
        del seconds
        self.tick()

    def close(self):
        self.unread.clear()


class Simulation:
    """An engine over the fake device that remembers what was asked and what came."""

    make_executor = FakeExecutor

    def __init__(
        self,
        *,
        block_size=16,
        num_blocks=64,
        max_model_len=256,
        seed=0,
        mixed=None,
        pooling=None,
        adapters=None,
        **options,
    ):
        facts = ModelFacts(
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            own_model_len=max_model_len,
            mixed_steps=mixed,
            pooling=pooling,
            adapters=adapters
            and AdapterFacts(
                num_slots=adapters[0],
                num_images=adapters[1],
                max_rank=8,
                targets=AdapterTargets({}),
            ),
        )
        config = EngineConfig(model="fake", seed=seed, **options)
        self.executor = self.make_executor(
            facts, config.max_num_seqs, config.max_num_batched_tokens, self.salt_in
        )
        self.engine = Engine(config, self.executor)
        self.library = self.engine._library = FakeLibrary()
        self.max_model_len, self.capacity = max_model_len, num_blocks * block_size + 1
        self.requests = {}
        self.adapters = {}
        self.salts = {}
        self.tokens = {}
        self.logprobs = {}
        self.prompt_logprobs = {}
        self.finished = {}
        self._num_told = 0  # of finished
        self.outputs = []

    def salt_in(self, slot):
        """The salt that the request in a slot came with."""
        return self.salts[self.engine._scheduler._running.by_slot[slot].request_id]

    def add(self, prompt, params, salt=None, adapter=0):
        stream = (self.engine.config.seed, self.engine.metrics.num_requests)
        if params.seed is not None:
            stream = (params.seed,)
        lora = LoRARequest(str(adapter), adapter, "folder") if adapter else None
        request = EngineRequest(prompt, params, cache_salt=salt, lora=lora)
        request_id = self.engine.add(request)
        self.salts[request_id] = salt, adapter
        self.adapters[request_id] = adapter
        self.requests[request_id] = (list(prompt), params, stream)
        for index in range(params.n):
            self.tokens[request_id, index] = []
            self.logprobs[request_id, index] = []
        return request_id

    def take(self, updates):
        for update in updates:
            key = update.request_id, update.index
            assert key not in self.finished, "an update after the last"
            assert update.token_ids or update.finish_reason in ("abort", "error")
            self.tokens[key] += update.token_ids
            self.logprobs[key] += update.logprobs or ()
            if update.prompt_logprobs is not None:
                assert key not in self.prompt_logprobs, "a prompt's logprobs come twice"
                self.prompt_logprobs[key] = list(update.prompt_logprobs)
            if update.finish_reason is not None:
                self.finished[key] = update.finish_reason, update.stop_reason

    def take_ended(self):
        """Those ended since the last call: [((request id, index), (reason, stop reason))]."""
        ended = list(islice(self.finished.items(), self._num_told, None))
        self._num_told = len(self.finished)
        return ended

    def abort(self, request_id, index=None):
        self.take(self.engine.abort(request_id, index))

    def step(self):
        self.library.tick()
        output = self.engine.step()
        self.outputs.append(output)
        self.take(output.updates)
        return output

    def steps(self, count):
        for _ in range(count):
            self.step()

    def run(self, max_steps=100_000):
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                break
            self.step()
        self.check()
        return self

    def check(self):
        """Every output is the truth (of an aborted one, its beginning), and nothing is held."""
        assert self.finished.keys() == self.tokens.keys(), "a request was lost"
        for (request_id, index), tokens in self.tokens.items():
            prompt, params, stream = self.requests[request_id]
            limit = min(self.max_model_len, self.capacity)
            seed, adapter = draw_key(*stream, index), self.adapters[request_id]
            want = truth(prompt, params, seed, limit, adapter)
            finish_reason, stop_reason = self.finished[request_id, index]
            if finish_reason in ("abort", "error"):
                assert tokens == want[0][: len(tokens)]
            elif self._outgrew(prompt, tokens, params, finish_reason):
                assert (tokens, finish_reason) == want[:2]
                assert "num_kvcache_blocks" in stop_reason
            else:
                assert (tokens, finish_reason, stop_reason) == want
            said = [] if params.logprobs is None else [said_of(token) for token in tokens]
            assert self.logprobs[request_id, index] == said
            asked = tokens and index == 0 and params.prompt_logprobs is not None
            said = [said_of(token) for token in prompt[1:]] if asked else None
            assert self.prompt_logprobs.get((request_id, index)) == said
        self.check_idle()

    def _outgrew(self, prompt, tokens, params, finish_reason):
        """Whether the pool alone ended a sequence."""
        length = len(prompt) + len(tokens)
        is_asked = length == self.max_model_len or len(tokens) == params.max_tokens
        return finish_reason == "length" and length == self.capacity and not is_asked

    def check_idle(self):
        metrics = self.engine.metrics
        assert metrics.num_running == metrics.num_waiting == 0
        assert metrics.num_free_blocks == metrics.num_blocks, "a block leaks"
        self.engine._scheduler.blocks.check([])  # its own books
        assert not self.engine._scheduler._waiting.num_tokens


class ColumnSimulation(Simulation):
    """The same over `step_columns`: tokens come by row, and updates only if there is more."""

    num_columns = 0
    """Tokens that came in no update."""

    def step(self):
        output = self.engine.step_columns()
        self.outputs.append(output)
        updated = {(update.request_id, update.index) for update in output.updates}
        for row, *tokens in zip(output.rows, *output.token_ids, strict=bool(output.rows)):
            key = row.request_id, row.index
            if key not in updated and key not in self.finished:
                self.tokens[key] += tokens
                self.num_columns += len(tokens)
        self.take(output.updates)
        return output


def greedy(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def prompt_of(length, first=2):
    return [(first + 7 * position) % 29 for position in range(length)]


def outputs(sim):
    """Tokens of each sequence in order of arrival."""
    return [tuple(sim.tokens[key]) for key in sorted(sim.tokens)]

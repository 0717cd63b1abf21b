"""An engine over the fake device, held against the truth."""

from itertools import islice

from fake_executor import FakeExecutor
from fake_model import EOS, VOCAB, said_of, truth
from nv_engine.config import EngineConfig
from nv_engine.engine import Engine
from nv_engine.facts import ModelFacts
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from nv_engine.scheduling.draw_key import draw_key


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
        )
        config = EngineConfig(model="fake", seed=seed, **options)
        self.executor = self.make_executor(
            facts, config.max_num_seqs, config.max_num_batched_tokens, self.salt_in
        )
        self.engine = Engine(config, self.executor)
        self.max_model_len, self.capacity = max_model_len, num_blocks * block_size + 1
        self.requests = {}
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

    def add(self, prompt, params, salt=None):
        stream = (self.engine.config.seed, self.engine.metrics.num_requests)
        if params.seed is not None:
            stream = (params.seed,)
        request_id = self.engine.add(EngineRequest(prompt, params, cache_salt=salt))
        self.salts[request_id] = salt
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
            want = truth(prompt, params, draw_key(*stream, index), limit)
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


def greedy(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def prompt_of(length, first=2):
    return [(first + 7 * position) % 29 for position in range(length)]


def outputs(sim):
    """Tokens of each sequence in order of arrival."""
    return [tuple(sim.tokens[key]) for key in sorted(sim.tokens)]

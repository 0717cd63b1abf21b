"""The manager against plain dicts, with calls that hypothesis picks."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from plain_cache import Model, Sequence, prompt


class Machine(RuleBasedStateMachine):
    """Hypothesis picks the calls."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from((16, 32, 64, 128)))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.model = Model(num_blocks, block_size)

    def live(self) -> bool:
        return bool(self.model.sequences)

    def pick(self, number: int) -> Sequence:
        return self.model.sequences[number % len(self.model.sequences)]

    @rule(
        words=st.lists(st.integers(0, 1), max_size=10),
        tail=st.integers(0, 2),
        salt=st.sampled_from((b"", b"", b"tenant")),
        serve=st.booleans(),
    )
    def match(self, words: list[int], tail: int, salt: bytes, serve: bool) -> None:
        if len(self.model.sequences) < 6:
            sequence = self.model.match(prompt(words, tail), salt)
            if serve:
                self.model.copied(sequence)
                self.model.extend(sequence, [])
                self.model.publish(sequence, sequence.num_tokens)

    @precondition(live)
    @rule(number=st.integers(0, 5), word=st.integers(0, 1), n=st.sampled_from((0, 1, 16, 32)))
    def extend(self, number: int, word: int, n: int) -> None:
        self.model.extend(self.pick(number), prompt([word] * 2, 0)[:n])

    @precondition(live)
    @rule(number=st.integers(0, 5), back=st.sampled_from((0, 0, 1, 20, 64)))
    def publish(self, number: int, back: int) -> None:
        sequence = self.pick(number)
        self.model.copied(sequence)
        self.model.publish(sequence, max(sequence.num_tokens - back, 0))

    @precondition(live)
    @rule(number=st.integers(0, 5), call=st.sampled_from(("copied", "free", "free", "preempt")))
    def call(self, number: int, call: str) -> None:
        getattr(self.model, call)(self.pick(number))

    @precondition(live)
    @rule(number=st.integers(0, 5), back=st.sampled_from((0, 0, 1, 17, 40)))
    def fork(self, number: int, back: int) -> None:
        sequence = self.pick(number)
        if len(self.model.sequences) < 6 and not sequence.copies:
            self.model.fork(sequence, max(sequence.num_tokens - back, 0))

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.model.reset()

    @invariant()
    def check(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.finish()


def test_state_machine_100_000_steps() -> None:
    run_machine(
        Machine,
        settings=settings(
            max_examples=1300,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

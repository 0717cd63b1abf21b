import io

from nv_api.progress import Progress
from tqdm import tqdm


class Clock:
    """Seconds that pass when a test lets them."""

    now = 0.0

    def __call__(self):
        return self.now


def run(steps, stream):
    """Steps of (seconds, prefill tokens, decode tokens, finished requests)."""
    clock = Clock()

    def bar(**options):
        return tqdm(file=stream, ascii=True, mininterval=0, **options)

    with Progress(4, bar, clock) as progress:
        for seconds, num_prefill, num_decode, num_finished in steps:
            clock.now += seconds
            progress.step(num_prefill, num_decode, num_finished)
    return stream.getvalue()


def test_the_bar_counts_requests_and_shows_both_rates():
    shown = run([(1.0, 100, 0, 1), (2.0, 0, 50, 3)], io.StringIO())
    assert "1/4" in shown
    assert "Prefill=100tok/s, Decode=0tok/s" in shown
    assert "Prefill=100tok/s, Decode=25tok/s" in shown
    assert "4/4" in shown.splitlines()[-1].split("\r")[-1]


def test_live_rates_are_recent_and_the_last_one_is_of_the_whole_call():
    shown = run([(1.0, 0, 10, 0), (1.0, 0, 30, 4)], io.StringIO())
    assert "Decode=10tok/s" in shown
    assert "Decode=30tok/s" in shown
    assert shown.rstrip().endswith("Decode=20tok/s]")


def test_a_mixed_step_counts_for_both():
    assert "Prefill=200tok/s, Decode=4tok/s" in run([(0.5, 100, 2, 4)], io.StringIO())


def test_short_calls_show_their_rates_at_the_end():
    assert "Prefill=1000tok/s" in run([(0.01, 10, 0, 4)], io.StringIO())


def test_no_bar_asks_for_no_time():
    def clock():
        calls.append(1)
        return 0.0

    calls: list[int] = []
    with Progress(1, False, clock) as progress:
        before = len(calls)
        progress.step(1, 1, 1)
        assert len(calls) == before

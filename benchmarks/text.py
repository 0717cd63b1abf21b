"""The cost of text: microseconds per token on the host, from an update of the engine to text.

One completion gets its tokens one by one, without a model. `kept`: text is read once, at the end.
`streamed`: a delta is read after each token. The stop strings are not in the text; those of
`common` begin with letters that most tokens have. A figure is CPU time of the fastest round, as
wall time means little on a busy machine.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

from nv_api.completion import Completion
from nv_api.detokenizer import ByteDetokenizer
from nv_api.prompts import TokenPrompt
from nv_api.request import Request
from nv_engine import SamplingParams, SequenceUpdate
from report import report

STOPS = {
    "without": (),
    "rare": ("\n\nUser:", "###", "<|im_end|>", "Observation:"),
    "common": ("the end of it", "and so they did", "in the other case", "so it is"),
}
WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "it", "was", "for", "on", "are", "as",
    "with", "his", "they", "at", "be", "this", "from", "have", "or", "one", "had", "by", "word",
    "but", "not", "what", "all", "were", "when", "your", "still", "there", "use", "each", "which",
    "their", "time", "if", "will", "way", "about", "many", "then", "them", "would", "write",
    "like", "these", "her", "long", "make", "thing", "see", "him", "two", "has", "look", "more",
    "day", "could", "go", "come", "did", "number", "sound", "most", "people", "over", "know",
    "water", "than", "call", "first", "who", "may", "down", "side", "been", "now", "find",
    "naïve", "日本",
)  # fmt: skip
ENDS = ("",) * 12 + (",", ".", ".\n")


def tokens(count: int) -> tuple[list[int], list[bytes]]:
    """Token ids of a text, and the bytes of each id: mostly a word after a space."""
    rng = random.Random(0)
    pieces = [f" {word}".encode() for word in WORDS]
    ends = {end: len(pieces) + index for index, end in enumerate(dict.fromkeys(ENDS[12:]))}
    pieces += [end.encode() for end in ends]
    weights = [1 / (1 + rank) for rank in range(len(WORDS))]  # Zipf's law
    token_ids: list[int] = []
    while len(token_ids) < count:
        token_ids += rng.choices(range(len(WORDS)), weights)
        if end := rng.choice(ENDS):
            token_ids.append(ends[end])
    return token_ids[:count], pieces


def run(updates: list[SequenceUpdate], pieces: list[bytes], stops: tuple[str, ...]) -> Request:
    """A request over its updates, up to before the last, as the processor counts them."""
    params = SamplingParams(stop=list(stops), max_tokens=None).frozen()
    completion = Completion(0, params, ByteDetokenizer(pieces.__getitem__))
    request = Request(0, TokenPrompt(None, [0]), (completion,))
    for update in updates:
        request.update(update)
        completion.begun = None
    return request


def stream(updates: list[SequenceUpdate], pieces: list[bytes], stops: tuple[str, ...]) -> None:
    """As `run`, with a delta after each token."""
    params = SamplingParams(stop=list(stops), max_tokens=None).frozen()
    completion = Completion(0, params, ByteDetokenizer(pieces.__getitem__))
    request = Request(0, TokenPrompt(None, [0]), (completion,))
    for update in updates:
        request.update(update)
        completion.begun = None
        completion.delta()


def keep(updates: list[SequenceUpdate], pieces: list[bytes], stops: tuple[str, ...]) -> None:
    """As `run`, with the text read at the end."""
    run(updates, pieces, stops).output()


def us_per_token(work: Callable[[], None], num_tokens: int) -> float:
    """Microseconds of CPU time per token."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / num_tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save")
    args = parser.parse_args()
    token_ids, pieces = tokens(args.tokens)
    updates = [SequenceUpdate(0, 0, (token,), None, None, 0, 0.0) for token in token_ids]
    cases = {
        f"{name} {kind}": partial(work, updates, pieces, stops)
        for name, work in (("kept", keep), ("streamed", stream))
        for kind, stops in STOPS.items()
    }
    rounds = [  # the cases in turn, so that a busy moment of the machine does not slow one alone
        {name: us_per_token(work, len(updates)) for name, work in cases.items()}
        for _ in range(args.rounds)
    ]
    figures = {name: round(min(each[name] for each in rounds), 2) for name in cases}
    report("text", {"tokens": args.tokens, "us_per_token": figures}, args.save)


if __name__ == "__main__":
    main()

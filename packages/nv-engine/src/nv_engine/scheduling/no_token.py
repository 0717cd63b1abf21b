"""No token: why the logits of a sequence gave no token, as a sentence for the user.

Owns the causes, the parameters that can lead to each, and the advice. Never looks at a logit: the
device reports only that there was nothing to draw.
"""

from collections.abc import Set

from nv_engine.params import SamplingParams

FORBIDDING = (
    "allowed_token_ids",
    "bad_words_token_ids",
    "logit_bias",
    "min_tokens",
    "repetition_penalty",
    "structured_outputs",
)
"""Parameters that can leave no token to draw."""
LARGE_LOGIT = 65504.0
"""Above what a sound model's logits reach."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def no_token_reason(params: SamplingParams, stop_token_ids: Set[int], *, has_grammar: bool) -> str:
    """The likeliest cause: the parameters, if they suffice for it, else the model.

    Args:
        params: of the sequence.
        stop_token_ids: every id that ends it, EOS included.
        has_grammar: whether its text must fit a grammar.
    """
    if _overflow(params):
        names = " and ".join(params.changed(("logit_bias", "repetition_penalty")))
        return (
            f"{names} made logits that fp32 cannot hold: give a bias nearer 0, or a penalty "
            "nearer 1"
        )
    forbidding = _forbidding(params)
    if _can_forbid_all(params, stop_token_ids, has_grammar=has_grammar):
        return (
            f"{', '.join(forbidding)} left no token to draw: allow one that the others do not "
            "forbid"
        )
    more = f" (or {', '.join(forbidding)} left no token to draw)" if forbidding else ""
    return (
        "the logits of this sequence hold NaN or infinity: look for damaged weights, or choose "
        f"a wider dtype, as float16 ends at 65504{more}"
    )


def _overflow(params: SamplingParams) -> bool:
    """True if the bias and the repetition penalty can lead from a sound logit to infinity."""
    bias = max(map(abs, (params.logit_bias or {}).values()), default=0.0)
    penalty = params.repetition_penalty
    return (LARGE_LOGIT + bias) * max(penalty, 1 / penalty) > LARGEST_FLOAT32


def _forbidding(params: SamplingParams) -> list[str]:
    """Which of FORBIDDING are given, by the names that the user gave."""
    own = {"bad_words_token_ids": "bad_words"} if params.bad_words else {}
    return [own.get(name, name) for name in params.changed(FORBIDDING)]


def _can_forbid_all(params: SamplingParams, stop_token_ids: Set[int], *, has_grammar: bool) -> bool:
    """True if together they can forbid every token.

    A grammar may allow a single token, which bad words or `allowed_token_ids` then forbid.
    """
    allowed, words = params.allowed_token_ids, params.bad_words_token_ids or ()
    if has_grammar:
        return bool(allowed or words)
    if not allowed:
        return False
    forbidden = {word[-1] for word in words}
    if params.min_tokens:
        forbidden |= stop_token_ids
    return forbidden.issuperset(allowed)

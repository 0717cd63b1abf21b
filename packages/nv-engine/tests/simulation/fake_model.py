"""A model whose next token is a hash of all it reads, and what one sequence gives with it alone.

Its KV cache holds one number a token, made of that token and of the number before it (a real key
depends on the whole prefix too).
"""

from nv_engine.batch import TokenLogprobs

VOCAB = 29
EOS = (0, 1)
UNWRITTEN = -1


def next_cell(previous, token, adapter=0):
    """The number of a token's place; another adapter gives another."""
    return (previous * 1_000_003 + 7919 * adapter + token + 1) & 0xFFFFFFFFFFFF


def draw(cells, seed, min_length, stops):
    """The token after `cells`: any function of all it reads, of the key and of the length."""
    token = hash((seed, tuple(cells))) % VOCAB
    while len(cells) < min_length and token in stops:
        token = (token + 1) % VOCAB
    return token


def draw_seed(params, seed):
    """A greedy draw depends on no key."""
    return 0 if params.greedy else seed


def stop_ids(params):
    return {*EOS, *(params.stop_token_ids or ())}


def truth(prompt, params, seed, limit, adapter=0):
    """The output of one sequence when it has a device of its own: (tokens, finish, stop reason)."""
    cells, cell, tokens, seed = [], 0, [], draw_seed(params, seed)
    for token in prompt:
        cell = next_cell(cell, token, adapter)
        cells.append(cell)
    eos = set() if params.ignore_eos else set(EOS)
    stops = eos | set(params.stop_token_ids or ())
    while True:
        token = draw(cells, seed, len(prompt) + params.min_tokens, stop_ids(params))
        tokens.append(token)
        if token in stops and len(tokens) > params.min_tokens:
            return tokens, "stop", None if token in eos else token
        if len(prompt) + len(tokens) == limit or len(tokens) == params.max_tokens:
            return tokens, "length", None
        cell = next_cell(cell, token, adapter)
        cells.append(cell)


def said_of(token):
    return TokenLogprobs([token], [0.0], 1)

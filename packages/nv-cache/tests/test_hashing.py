from array import array
from itertools import chain as concatenated

import pytest
from nv_cache import BlockManager, HashChain
from nv_cache.hashing import beginnings, digest, pack

TOKENS = [5, 2**32 - 1, 0, *range(1000, 1061)]


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        memoryview(array("I", TOKENS)),
        memoryview(array("I", TOKENS).tobytes()).cast("i"),
    ],
    ids=["tuple", "array I", "array q", "memoryview I", "memoryview i"],
)
def test_equal_tokens_have_equal_names_in_every_container(tokens) -> None:
    expected, got = HashChain(16), HashChain(16)
    expected.extend(TOKENS, 4)
    got.extend(tokens, 4)
    assert got.digests == expected.digests


@pytest.mark.parametrize("tokens", [range(64), bytes(range(64)), array("B", range(64))])
def test_any_sequence_of_integers_is_packed(tokens) -> None:
    assert pack(tokens, 16, 48).tolist() == pack(list(range(64)), 16, 48).tolist()


def test_a_strided_view_is_packed_by_its_values() -> None:
    view = memoryview(array("I", range(64)))[::2]
    assert pack(view, 0, 32).tolist() == pack(list(range(0, 64, 2)), 0, 32).tolist()


def test_packed_buffers_are_not_copied() -> None:
    tokens = array("I", range(64))
    packed = pack(tokens, 16, 48)
    tokens[16] = 7
    assert packed[:4].tolist() == list((7).to_bytes(4, "little"))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_32_bits_is_a_value_error(token) -> None:
    blocks = BlockManager(4, 32)
    table = blocks.match(list(range(32)))
    assert blocks.extend(table, 32)
    blocks.publish(table, list(range(32)), 32)
    with pytest.raises(ValueError, match=f"token id {token} is not valid"):
        blocks.match([*range(32), *range(20), token, *range(20)])
    with pytest.raises(
        ValueError, match=f"token id {token} is not valid"
    ):  # in the part after a block that hits
        blocks.match([*range(32), token, *range(20)])
    blocks.check([table])


def test_a_name_covers_everything_before_it() -> None:
    first, second = HashChain(16), HashChain(16)
    first.extend([1] * 48, 3)
    second.extend([2] * 16 + [1] * 32, 3)
    assert len({*first.digests, *second.digests}) == 6


def test_the_salt_keys_the_whole_chain() -> None:
    chains = [HashChain(16, salt) for salt in (b"", b"a", b"b")]
    for chain in chains:
        chain.extend([1] * 32, 2)
    assert len(set(concatenated(*(chain.digests for chain in chains)))) == 6


def test_a_chain_reads_only_what_is_new() -> None:
    chain, whole = HashChain(16), HashChain(16)
    tokens = list(range(64))
    whole.extend(tokens, 4)
    chain.extend(tokens, 2)
    chain.extend([-1] * 32 + tokens[32:], 4)  # the first 32 are not read again
    chain.extend([], 1)
    assert chain.digests == whole.digests


def test_a_forked_chain_does_not_change_its_source() -> None:
    chain = HashChain(16, b"s")
    chain.extend(list(range(64)), 4)
    fork = chain.fork(1)
    fork.extend([*range(16), *[9] * 16], 2)
    assert fork.digests[0] == chain.digests[0]
    assert fork.digests[1] != chain.digests[1]
    assert fork.digests[1] == digest(chain.digests[0], pack([9] * 16, 0, 16))
    assert len(chain.digests) == 4


def test_names_of_beginnings_are_those_of_their_tokens() -> None:
    packed, parent = pack(TOKENS, 0, 64), digest(b"", pack([7], 0, 1))
    ends = range(1, 5)
    expected = [digest(parent, pack(TOKENS, 0, end * 16)) for end in ends]
    assert beginnings(parent, packed, ends) == expected
    assert beginnings(parent, packed, ()) == []

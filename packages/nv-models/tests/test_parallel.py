"""The arithmetic of splitting. The collectives are in test_tensor_parallel.py."""

import nv_kernels as nk
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nv_models import TensorParallel


@given(size=st.integers(1, 8), share=st.integers(1, 40))
def test_split_is_a_partition(size, share):
    parts = [TensorParallel(rank, size).split(size * share, "heads") for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(size * share))


def test_split_names_what_does_not_divide_and_what_does():
    with pytest.raises(ValueError, match=r"size 3 .* num_attention_heads = 16; .*\[1, 2, 4, 8\]"):
        TensorParallel(0, 3).split(16, "num_attention_heads")


def test_kv_heads_are_shared_out_or_replicated():
    assert [list(TensorParallel(rank, 2).split_kv_heads(8)) for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    heads = [list(TensorParallel(rank, 8).split_kv_heads(2)) for rank in range(8)]
    assert heads == [[0]] * 4 + [[1]] * 4
    with pytest.raises(ValueError, match="num_key_value_heads = 3"):
        TensorParallel(0, 4).split_kv_heads(3)


@given(size=st.integers(1, 8), vocab_size=st.integers(1, 300))
def test_vocabulary_parts_are_padded_to_equal_rows(size, vocab_size):
    ranks = [TensorParallel(rank, size) for rank in range(size)]
    parts = [rank.split_vocabulary(vocab_size) for rank in ranks]
    rows = ranks[0].vocabulary_rows(vocab_size)
    assert [index for part in parts for index in part] == list(range(vocab_size))
    assert all(len(part) <= rows for part in parts)
    starts = [min(rank * rows, vocab_size) for rank in range(size)]
    assert [part.start for part in parts] == starts
    assert size == 1 or rows % 8 == 0


def test_one_rank_does_nothing():
    x = torch.randn(3, 4)
    assert TensorParallel().all_reduce(x) is x
    assert TensorParallel().all_gather_last(x) is x


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (0, 0)])
def test_rank_outside_size(rank, size):
    with pytest.raises(ValueError, match=rf"rank is {rank}: it must be .* below size, {size}"):
        TensorParallel(rank, size)


def test_a_batch_invariant_layer_sums_in_order_of_rank():
    parallel = TensorParallel(0, 2)
    assert nk.arithmetic("batch_invariant").rank_sum(parallel).whole == parallel.sum_in_order
    assert nk.arithmetic("fast").rank_sum(parallel).whole == parallel.all_reduce

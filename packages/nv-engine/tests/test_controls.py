"""Each control against transformers' logits processors, alone and mixed, through the tables."""

import itertools
import random

import pytest
import torch
from control_cases import EOS, PARAMS, VOCAB, WORDS, Rows, params_of, random_logits
from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.device.control_tables import SlotTable
from nv_engine.device.sampling_flags import ControlFlags
from nv_engine.device.sampling_tables import SamplingTables
from nv_engine.device.slots import Slots
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.params import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_known", [0, 1, 4])
@pytest.mark.parametrize("names", [*([name] for name in PARAMS), [*PARAMS, *PARAMS][:16]], ids=str)
def test_controls_equal_transformers(names, num_known):
    rows = Rows(names, num_known=num_known)
    for step in range(12):
        logits_RV = random_logits(len(names), step)
        rows.check(logits_RV)
        rows.step(logits_RV)


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 3e38])
def test_the_largest_penalties_leave_logits_finite(penalty):
    rows = Rows(["plain"])
    slot, _, prompt, drawn = rows.rows[0]
    rows.admit([(slot, SamplingParams(repetition_penalty=penalty), prompt, drawn)])
    logits_RV = 100 * random_logits(1)
    shaped_V = rows.shaped(logits_RV)[0]
    assert shaped_V.isfinite().all()
    known = sorted({*prompt, *drawn})
    wins = logits_RV[0, known].amax() > 0 if penalty < 1 else False
    assert (int(shaped_V.argmax()) in known) == wins


def test_a_bad_word_is_never_drawn():
    rows = Rows(["words"] * 8 + ["plain"] * 8)
    for step in range(60):
        rows.step(random_logits(16, step))
    texts = [" " + " ".join(map(str, drawn[3:])) + " " for _, _, _, drawn in rows.rows]
    counts = [
        sum(text.count(" " + " ".join(map(str, word)) + " ") for word in WORDS) for text in texts
    ]
    assert counts[:8] == [0] * 8
    assert all(counts[8:])


def test_a_slot_forgets_the_sequence_before():
    names = [*PARAMS]
    rows = Rows(names)
    rows.step(random_logits(len(names)))
    shuffled = random.Random(1).sample(names, len(names))
    rows.rows = [
        (slot, params_of(name), [5, 6, 7], [8])
        for name, (slot, _, _, _) in zip(shuffled, rows.rows, strict=True)
    ]
    rows.admit(rows.rows)
    for step in range(4):
        rows.check(random_logits(len(names), step))
        rows.step(random_logits(len(names), step))


@pytest.mark.parametrize("interrupted", range(3))
def test_16_after_an_interrupt_a_slot_forgets_the_sequence_before(monkeypatch, interrupted):
    rows = Rows(["penalties", "presence"])
    rows.step(random_logits(2))
    plain = (rows.rows[0][0], params_of("plain"), [5, 6, 7], [8])
    clear, calls = SlotTable.clear, itertools.count()

    def interrupt(table, slot):
        if next(calls) == interrupted:
            raise KeyboardInterrupt
        clear(table, slot)

    monkeypatch.setattr(SlotTable, "clear", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rows.admit([plain])
    monkeypatch.undo()
    rows.rows = [plain, rows.rows[1]]
    rows.admit(rows.rows)  # as after a failed step
    rows.check(random_logits(2))


def test_plain_rows_ask_for_nothing_in_any_company():
    rows = Rows(["plain", "penalties"])
    assert rows.inputs()[2].controls == ControlFlags(penalties=True)
    rows.rows = rows.rows[:1]
    assert not any(rows.inputs()[2].controls)
    assert rows.inputs()[2].num_logprobs is None


def test_moved_tables_are_reported():
    rows = Rows(["plain"])
    assert not rows.admit([(3, params_of("plain"), [5], [])])
    assert rows.admit([(3, params_of("penalties"), [5], [])])
    assert not rows.admit([(2, params_of("penalties"), [5], [])])
    assert rows.admit([(15, params_of("presence"), [5], [])])
    assert rows.admit([(3, params_of("a word"), [5], [])])
    assert rows.admit([(2, params_of("words"), [5], [])])  # more words, and longer ones
    assert not rows.admit([(1, params_of("words"), [5], [])])


def test_a_table_keeps_its_rows_when_it_grows():
    table = SlotTable(40, (2,), -1, torch.int64, CPU)
    assert table.rows(torch.tensor([0, 39])).tolist() == [[-1, -1], [-1, -1]]
    table.fit(3, 2)
    table.data[3] = torch.tensor([5, 6])
    table.fit(3, 4)
    table.fit(30, 1)
    assert table.data.shape == (32, 4)
    assert table.rows(torch.tensor([3, 30, 39])).tolist() == [[5, 6, -1, -1], [-1] * 4, [-1] * 4]
    table.fit(31, 4)
    assert table.data.shape == (41, 4)  # no more than there are slots
    table.clear(3)
    assert (table.data == -1).all()


@pytest.mark.parametrize("first", range(20))
def test_slots_without_a_row_read_the_neutral_one_however_a_table_grew(first):
    table, asked = SlotTable(20, (), -1, torch.int64, CPU), set()
    for slot in (first, *range(20)):
        table.fit(slot)
        table.data[slot] = slot
        asked.add(slot)
        expected = [each if each in asked else -1 for each in range(20)]
        assert table.rows(torch.arange(20)).tolist() == expected


def test_tables_take_the_bytes_of_the_docs():
    """4 bytes a token of the vocabulary and a slot for penalties, 1 for allowed tokens."""
    num_slots, vocab_size = 40, 5000
    rows = Slots(num_slots, 4, CPU).tables
    tables = SamplingTables(rows, vocab_size, EOS, num_ids=4000)
    wanted = {"allowed_token_ids": [4500], "frequency_penalty": 1.0, "logit_bias": {3: 1.0}}
    wanted["structured_outputs"] = StructuredOutputsParams(regex="a")
    before = tables.controls.num_bytes
    row = 5 * vocab_size + 4 * -(-vocab_size // 32) + 3 * 4 + 8 + 4 + 1
    # a mask, penalties, a bias, and that an id is past the tokenizer's
    most = (num_slots + 1) * row
    for slot in range(num_slots):
        tables.update(Batch((), (Admission(slot, SamplingParams(**wanted), 0, 1, (3,)),)))
        assert before < tables.controls.num_bytes <= most
    assert tables.controls.num_bytes == most


def test_flags_round_logprobs_up_so_that_few_graphs_are_captured():
    tables = SamplingTables(Slots(4, 4, CPU).tables, VOCAB, EOS)
    asked = (None, 0, 5, -1)
    for slot, num in enumerate(asked):
        params = SamplingParams(logprobs=num)
        tables.update(Batch((), (Admission(slot, params, 0, 1, (3,)),)))
    chunks = [Chunk(slot, 0, 1, (3,), True) for slot in range(4)]
    found = [
        tables.flags(chunks[first:last]).num_logprobs
        for first, last in [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (0, 4)]
    ]
    assert found == [None, 0, 0, 8, 8, VOCAB]


def test_greedy_and_drawn_steps_share_a_graph_and_filters_of_greedy_rows_do_not_count():
    tables = SamplingTables(Slots(4, 4, CPU).tables, VOCAB, EOS)
    asked = ({"temperature": 0}, {"temperature": 0, "top_k": 5}, {"temperature": 0.7}, {"top_k": 5})
    found = []
    for slot, options in enumerate(asked):
        tables.update(Batch((), (Admission(slot, SamplingParams(**options), 0, 1, (3,)),)))
        found.append(tables.flags([Chunk(slot, 0, 1, (3,), True)]))
    assert found[0] == found[1] == found[2] != found[3]

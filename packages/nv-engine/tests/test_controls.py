"""Each control against transformers' logits processors, alone and mixed, through the tables."""

import random

import pytest
import torch
from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.device.control_tables import SlotTable, most_bytes
from nv_engine.device.controls import ControlFlags
from nv_engine.device.ring import ResultRing
from nv_engine.device.sampler import control, sample
from nv_engine.device.slots import Slots
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.params import SamplingParams
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

VOCAB = 50
EOS = (1, 2)
CPU = torch.device("cpu")
WORDS = ((7,), (3, 4), (4, 3), (5, 5, 5), (3, 4, 9, 8))
PARAMS = {
    "plain": {},
    "allowed": {"allowed_token_ids": [3, 4, 8, 20, 49]},
    "words": {"bad_words_token_ids": WORDS},
    "a word": {"bad_words_token_ids": WORDS[1:2]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [9]},
    "bias": {"logit_bias": {0: 2.5, 4: -100.0, 49: 0.25}},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": -1.5},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.6},
    "all": {
        "allowed_token_ids": list(range(1, 40)),
        "bad_words_token_ids": WORDS,
        "min_tokens": 8,
        "logit_bias": {4: 3.0, 9: -2.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.6,
    },
}


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=None, temperature=0, **PARAMS[name])


def expected(logits_V, params, prompt, drawn):
    """The definition: transformers' processors in vLLM's order, and OpenAI's two penalties."""
    bad = [list(word) for word in params.bad_words_token_ids or ()]
    allowed = params.allowed_token_ids
    shaping = LogitsProcessorList()
    if allowed is not None:
        shaping.append(SuppressTokensLogitsProcessor([*({*range(VOCAB)} - {*allowed})], "cpu"))
    if params.min_tokens:
        ends = [*EOS, *(params.stop_token_ids or ())]
        shaping.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends, "cpu")
        )
    if params.logit_bias:
        shaping.append(SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        shaping.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = logits_V[None].clone()
    if bad:  # of drawn tokens alone; it passes over words that are longer than what it sees
        behind = torch.tensor([[0] * 5 + drawn])
        scores = NoBadWordsLogitsProcessor(bad)(behind, scores)
    scores = shaping(torch.tensor([[*prompt, *drawn]]), scores)
    for token in set(drawn):
        scores[0, token] -= params.frequency_penalty * drawn.count(token)
        scores[0, token] -= params.presence_penalty
    return scores[0]


class Rows:
    """Sequences in slots, of which some tokens came with the admission and some were drawn."""

    def __init__(self, names, *, num_known=3, seed=0):
        rng = random.Random(seed)
        slots = rng.sample(range(16), len(names))
        self.slots = Slots(16, 4, VOCAB, EOS, CPU)
        self.rows = []
        for name, slot in zip(names, slots, strict=True):
            prompt = [rng.randrange(3, 12) for _ in range(6)]
            drawn = [rng.randrange(3, 6) for _ in range(num_known)]
            self.rows.append((slot, params_of(name), prompt, drawn))
        self.admit(self.rows)

    def admit(self, rows):
        admissions = tuple(
            Admission(slot, params, 0, len(prompt), (*prompt, *drawn))
            for slot, params, prompt, drawn in rows
        )
        return self.slots.update(Batch((), admissions))

    def inputs(self):
        chunks = [Chunk(s, len(p) + len(d) - 1, 1, (), True) for s, _, p, d in self.rows]
        slots_R = torch.tensor([chunk.slot for chunk in chunks])
        lengths_R = torch.tensor([chunk.start + 1 for chunk in chunks])
        return slots_R, lengths_R, self.slots.flags(chunks, 1)

    def check(self, logits_RV):
        slots_R, lengths_R, flags = self.inputs()
        shaped_RV = logits_RV.clone()
        control(shaped_RV, self.slots, slots_R, lengths_R, flags)
        for got, logits, (_, params, prompt, drawn) in zip(
            shaped_RV, logits_RV, self.rows, strict=True
        ):
            torch.testing.assert_close(got, expected(logits, params, prompt, drawn))
            if params == params_of("plain"):
                assert torch.equal(got, logits)

    def step(self, logits_RV):
        slots_R, lengths_R, flags = self.inputs()
        raw_RV = logits_RV.clone()
        ring = ResultRing(1, len(self.rows), CPU)
        sampling = self.slots.sampling(slots_R, lengths_R, flags)
        sample(logits_RV, self.slots, slots_R, sampling, flags, ring=ring)
        assert torch.equal(logits_RV, raw_RV)  # logprobs come from these
        (ids_R,) = ring.expect(1)
        for token, (_, _, _, drawn) in zip(ids_R.tolist(), self.rows, strict=True):
            drawn.append(token)


def random_logits(num_rows, seed=0):
    logits_RV = 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits_RV[:, 3:6] += 4  # so that words come about
    return logits_RV


@pytest.mark.parametrize("num_known", [0, 1, 4])
@pytest.mark.parametrize("names", [*([name] for name in PARAMS), [*PARAMS, *PARAMS][:16]], ids=str)
def test_controls_equal_transformers(names, num_known):
    rows = Rows(names, num_known=num_known)
    for step in range(12):
        logits_RV = random_logits(len(names), step)
        rows.check(logits_RV)
        rows.step(logits_RV)


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


def test_plain_rows_ask_for_nothing_whoever_else_is_there():
    rows = Rows(["plain", "penalties"])
    assert rows.inputs()[2].controls == ControlFlags(penalties=True)
    rows.rows = rows.rows[:1]
    assert not any(rows.inputs()[2].controls)
    assert rows.inputs()[2].num_logprobs is None


def test_moved_tables_are_told():
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


def test_tables_stay_within_what_a_budget_is_told():
    num_slots, vocab_size = 40, 5000
    slots = Slots(num_slots, 4, vocab_size, EOS, CPU)
    wanted = {"allowed_token_ids": [3], "frequency_penalty": 1.0, "logit_bias": {3: 1.0}}
    wanted["structured_outputs"] = StructuredOutputsParams(regex="a")
    before = slots.controls.num_bytes
    for slot in range(num_slots):
        slots.update(Batch((), (Admission(slot, SamplingParams(**wanted), 0, 1, (3,)),)))
        assert before < slots.controls.num_bytes <= most_bytes(num_slots, vocab_size)
    most = most_bytes(num_slots, vocab_size) - 20 * 4 * vocab_size  # no table is growing
    assert slots.controls.num_bytes == most + 41 * (8 + 4)  # and a bias each


def test_flags_round_logprobs_up_so_that_few_graphs_are_captured():
    slots = Slots(4, 4, VOCAB, EOS, CPU)
    asked = (None, 0, 5, -1)
    for slot, num in enumerate(asked):
        params = SamplingParams(logprobs=num)
        slots.update(Batch((), (Admission(slot, params, 0, 1, (3,)),)))
    chunks = [Chunk(slot, 0, 1, (3,), True) for slot in range(4)]
    found = [
        slots.flags(chunks[first:last], 1).num_logprobs
        for first, last in [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (0, 4)]
    ]
    assert found == [None, 0, 0, 8, 8, VOCAB]

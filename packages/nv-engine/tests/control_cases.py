"""Each control against transformers' logits processors: cases and truth, for any device."""

import random

import torch
from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.device.draw_head import controls_of, sample
from nv_engine.device.ring import ResultRing
from nv_engine.device.sampling_tables import SamplingTables
from nv_engine.device.slots import Slots
from nv_engine.params import SamplingParams
from nv_kernels import FROM_SLOT, shape_logits, step_rows
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
    vocab_size, device = len(logits_V), logits_V.device
    bad = [list(word) for word in params.bad_words_token_ids or ()]
    allowed = params.allowed_token_ids
    shaping = LogitsProcessorList()
    if allowed is not None:
        suppressed = [*({*range(vocab_size)} - {*allowed})]
        shaping.append(SuppressTokensLogitsProcessor(suppressed, device))
    if params.min_tokens:
        ends = [*EOS, *(params.stop_token_ids or ())]
        shaping.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends, device)
        )
    if params.logit_bias:
        shaping.append(SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        shaping.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = logits_V[None].clone()
    if bad:  # of drawn tokens alone; it passes over words that are longer than what it sees
        behind = torch.tensor([[0] * 5 + drawn], device=device)
        scores = NoBadWordsLogitsProcessor(bad)(behind, scores)
    scores = shaping(torch.tensor([[*prompt, *drawn]], device=device), scores)
    for token in set(drawn):
        scores[0, token] -= params.frequency_penalty * drawn.count(token)
        scores[0, token] -= params.presence_penalty
    return scores[0]


class Rows:
    """Sequences in slots, of which some tokens came with the admission and some were drawn."""

    def __init__(self, names, *, num_known=3, seed=0, device="cpu", vocab_size=VOCAB):
        rng = random.Random(seed)
        slots = rng.sample(range(16), len(names))
        self.device = torch.device(device)
        self.slots = Slots(16, 4, self.device)
        self.tables = SamplingTables(self.slots.tables, vocab_size, EOS)
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
        return self.tables.update(Batch((), admissions))

    def inputs(self):
        chunks = [Chunk(s, len(p) + len(d) - 1, 1, (), True) for s, _, p, d in self.rows]
        slots_R = torch.tensor([chunk.slot for chunk in chunks], device=self.device)
        lengths_R = torch.tensor([chunk.start + 1 for chunk in chunks], device=self.device)
        return slots_R, lengths_R, self.tables.flags(chunks)

    def shaped(self, logits_RV):
        slots_R, lengths_R, flags = self.inputs()
        return shape_logits(logits_RV, controls_of(self.tables, slots_R, lengths_R, flags))

    def check(self, logits_RV):
        shaped_RV = self.shaped(logits_RV)
        for got, logits, (_, params, prompt, drawn) in zip(
            shaped_RV, logits_RV, self.rows, strict=True
        ):
            want = expected(logits.float(), params, prompt, drawn)
            torch.testing.assert_close(got, want)
            if params == params_of("plain"):
                assert torch.equal(got, logits.float())

    def step(self, logits_RV):
        slots_R, lengths_R, flags = self.inputs()
        raw_RV = logits_RV.clone()
        ring = ResultRing(1, len(self.rows), self.device)
        self.slots.tables.computed[slots_R] = lengths_R.int() - 1
        rows = decoding_rows(self.slots, slots_R, block_size=256)
        sample(logits_RV, self.tables, slots_R, flags.sampling(rows), flags, ring=ring)
        assert torch.equal(logits_RV, raw_RV)  # logprobs come from these
        (ids_R,) = ring.expect(1)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for token, (_, _, _, drawn) in zip(ids_R.tolist(), self.rows, strict=True):
            drawn.append(token)


def decoding_rows(slots, slots_R, block_size):
    """The rows that a step reads in which each slot's newest token is computed."""
    from_slot_R = torch.full_like(slots_R, FROM_SLOT)
    starts = torch.arange(len(slots_R) + 1, device=slots_R.device)
    sizes = {"num_decodes": len(slots_R), "block_size": block_size, "padding": slots.padding}
    return step_rows(from_slot_R, slots_R, from_slot_R, starts, slots.tables, **sizes)


def random_logits(num_rows, seed=0, *, vocab_size=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logits_RV[:, 3:6] += 4  # so that words come about
    return logits_RV

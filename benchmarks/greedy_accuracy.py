"""How often greedy bf16 picks another token than fp32: logits rounded to bf16, and not rounded.

Teacher-forced: each engine reads the same text, a prompt and fp32's greedy answer, and its
likeliest token at each place is compared. Free: an answer counts up to its first different token.
`rounded` is a head that rounds its sums to bf16, as most engines do. The models are those of
`fp8_accuracy.py`.
"""

import argparse
from pathlib import Path
from unittest import mock

import torch
from fp8_accuracy import agreement, prompts_for, reads_bytes
from nv_api import LLM, SamplingParams
from nv_models.layers.embedding import Head
from report import report


def rounded(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in the weights' dtype."""
    return UNROUNDED(head, hidden).to(hidden.dtype)


UNROUNDED = Head.logits
HEADS = {"bf16, rounded": rounded, "bf16": UNROUNDED}


class Reader:
    """A model in one dtype, greedy."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        self.num_tokens = args.num_tokens
        options = {"skip_tokenizer_init": reads_bytes(args.model), "max_num_seqs": 8}
        self.llm = LLM(args.model, dtype=dtype, enable_prefix_caching=False, **options)

    def answers(self, prompts: list) -> list[tuple[list[int], list[int]]]:
        """Each prompt's ids and the answer's."""
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]

    def likeliest(self, texts: list[list[int]]) -> list[int]:
        """The likeliest token at each place but the first of each text."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        # An entry holds the text's own token, then the likeliest if that is another.
        return [next(reversed(entry)) for o in outputs for entry in o.prompt_logprobs if entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-tokens", type=int, default=64, help="per greedy answer")
    parser.add_argument("--num-passages", type=int, default=32, help="without a tokenizer")
    parser.add_argument(
        "--passage-length", type=int, default=256, help="in bytes, without a tokenizer"
    )
    parser.add_argument("--save")
    args = parser.parse_args()
    prompts = prompts_for(args.model, args.num_passages, args.passage_length)
    truth = Reader(args, "float32")
    pairs = truth.answers(prompts)
    texts = [prompt + answer for prompt, answer in pairs]
    expected, answers = truth.likeliest(texts), [answer for _, answer in pairs]
    truth.llm.close()
    figures: dict[str, object] = {
        "model": Path(args.model).name,
        "answers": len(answers),
        "tokens": len(expected),
    }
    for name, head in HEADS.items():
        with mock.patch.object(Head, "logits", autospec=True, side_effect=head) as product:
            reader = Reader(args, "bfloat16")
            picked = reader.likeliest(texts)
            free = [answer for _, answer in reader.answers([prompt for prompt, _ in pairs])]
            reader.llm.close()
        if not product.called:
            raise RuntimeError("the model does not call Head.logits: patch what it calls")
        others = sum(a != b for a, b in zip(picked, expected, strict=True))
        figures[name] = {
            "other_tokens": others,
            "other_tokens_percent": round(100 * others / len(expected), 3),
            "answers_as_fp32": sum(a == b for a, b in zip(free, answers, strict=True)),
            "free_tokens_as_fp32": round(agreement(free, answers), 3),
        }
    report("greedy_accuracy", figures, args.save)


if __name__ == "__main__":
    main()

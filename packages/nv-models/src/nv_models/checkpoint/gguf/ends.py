"""The tokens of a GGUF file that end a text.

Owns the keys that name one, and the texts by which llama.cpp finds the others (its
`special_eog_ids`, github.com/ggml-org/llama.cpp, src/llama-vocab.cpp): files often name only one of
a family's ends. Never builds a tokenizer.
"""

import re

from nv_models.checkpoint.gguf.section import Section

KEYS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
)
TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        # Of a file that is filled in: padding, a repository's name, the end of a file.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
SPM_EOS = 2
"""The EOS of a SentencePiece vocabulary that names none."""
NOT_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)
"""A text that ends only a part of an answer where the vocabulary has these others."""


MARKED = re.compile(r"[<\[{|｜]")  # noqa: RUF001
"""Characters that the names of tokens which end a text have, and words do not."""
BYTE = re.compile("<0x[0-9A-F]{2}>")


def is_plain_text(token: str) -> bool:
    """Whether a token looks like a part of ordinary text: a letter, a byte, or a word."""
    if len(token) <= 1:
        return bool(token)
    return bool(BYTE.fullmatch(token)) or not MARKED.search(token)


def end_doubts(values: Section) -> list[str]:
    """The oddities of a file's ends, which llama.cpp runs: one sentence each."""
    tokens = values.texts("tokens")
    given = {key: values.index(key, len(tokens)) for key in KEYS}
    ends = end_ids(values, len(tokens))
    found = [
        f"{values.name}.{key} is {index}, the token {tokens[index]!r}, which is a part of ordinary "
        "text: an answer ends where it comes; convert the file again, or pass ignore_eos=True"
        for key, index in given.items()
        if index is not None and is_plain_text(tokens[index])
    ]
    if given["eos_token_id"] is None and SPM_EOS in ends and is_plain_text(tokens[SPM_EOS]):
        found.append(
            f"{values.name}.eos_token_id is missing, and its default is {SPM_EOS}, the token "
            f"{tokens[SPM_EOS]!r}, which is a part of ordinary text: an answer ends where it "
            "comes; convert the file again, or pass ignore_eos=True"
        )
    if not ends:
        found.append(
            f"{values.name} has neither eos_token_id nor eot_token_id, and no token that ends a "
            "text by its name, such as <|im_end|>: texts end at max_tokens or a stop string only; "
            "convert the file again, or pass stop_token_ids"
        )
    return found


def end_texts(tokens: list[str]) -> frozenset[str]:
    """The tokens that end a text by their names."""
    found = TEXTS.intersection(tokens)
    return found - {text for text, others in NOT_ENDS if others <= found}


def end_ids(values: Section, vocab_size: int) -> list[int]:
    """Every id that ends a text: those that `tokenizer.ggml` names first.

    Raises:
        ValueError: an id past the vocabulary, or a list of tokens that is not one.
    """
    named = [values.index(key, vocab_size) for key in KEYS]
    tokens = values.texts("tokens")
    if named[0] is None and values.text("model", "") == "llama" and vocab_size > SPM_EOS:
        named[0] = SPM_EOS
    texts = end_texts(tokens)
    by_text = [index for index, token in enumerate(tokens) if token in texts]
    return list(dict.fromkeys(index for index in (*named, *by_text) if index is not None))

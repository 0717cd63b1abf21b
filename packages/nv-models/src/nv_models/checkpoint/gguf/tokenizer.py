"""The tokenizer that a GGUF file carries, as one that transformers loads.

Owns: the two kinds (byte-level BPE, SentencePiece BPE) and each family's way to cut text into
words, which GGUF only names.
Never: tokenizes.
"""

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from nv_models.checkpoint.gguf.header import Header

CONTROL, USER_DEFINED = 3, 4  # token types
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_A_WORD = {"qwen2": "", "llama-bpe": "{1,3}", "llama3": "{1,3}", "llama-v3": "{1,3}"}
PLAIN_PRE_TOKENIZERS = ("smollm", "gpt-2", "default")
SPACE = "\u2581"


def build_tokenizer(header: Header, max_length: int) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the file's vocabulary, special tokens and chat template.

    Raises:
        ValueError: a kind of tokenizer or of word splitting that is not known.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
    kind = values.get("model")
    if kind not in builders:
        raise ValueError(
            f"{header.file} has a tokenizer of kind {kind!r}; supported are {', '.join(builders)}"
        )
    tokenizer = builders[kind](values)
    add_special_tokens(tokenizer, values)
    add_bos(tokenizer, values, default=kind == "llama" or values.get("pre") == "llama-bpe")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{name}_token": values["tokens"][values[f"{key}_token_id"]]
        for name, key in names.items()
        if f"{key}_token_id" in values
    }
    make: Any = PreTrainedTokenizerFast  # untyped
    built: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **named,
    )
    return built


def byte_level_bpe(values: dict[str, Any]) -> Tokenizer:
    """GPT-2's kind: bytes as printable characters, merges in order."""
    vocabulary = {token: index for index, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in values["merges"]]
    pre = values.get("pre", "default")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in {"llama-bpe", "llama3"}))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = word_splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def word_splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    """How a family cuts text into words before BPE, by `tokenizer.ggml.pre`.

    Raises:
        ValueError: an unknown name; guessing would silently give other tokens.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in {"gpt-2", "default"}:
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in DIGITS_A_WORD:
        words = pre_tokenizers.Split(Regex(WORDS % DIGITS_A_WORD[pre]), behavior="isolated")
        raw_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, raw_bytes])
    known = ", ".join([*PLAIN_PRE_TOKENIZERS, *DIGITS_A_WORD])
    raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {known}")


def sentencepiece_bpe(values: dict[str, Any]) -> Tokenizer:
    """SentencePiece's kind: spaces are letters, unknown characters fall back to bytes."""
    vocabulary = {token: index for index, token in enumerate(values["tokens"])}
    merges = merges_from_scores(vocabulary, values["scores"])
    unknown = values["tokens"][values.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = values.get("add_space_prefix", True)
    start = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: all splits of all tokens, by that."""
    merges: list[tuple[str, str]] = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def add_special_tokens(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    """Control tokens are matched whole and left out of text; user-defined ones stay in it."""
    kinds = values.get("token_type", [])
    for token, kind in zip(values["tokens"], kinds, strict=False):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def add_bos(tokenizer: Tokenizer, values: dict[str, Any], default: bool) -> None:
    """Put the first token before every text, where the file asks for it."""
    index = values.get("bos_token_id")
    if index is None or not values.get("add_bos_token", default):
        return
    bos = values["tokens"][index]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
    )

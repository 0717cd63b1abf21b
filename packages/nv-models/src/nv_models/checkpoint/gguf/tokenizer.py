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
from nv_models.checkpoint.gguf.section import Section

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
        ValueError: a kind of tokenizer or of word splitting that is not known, or metadata that is
            not there or of another type.
    """
    values = Section(header, "tokenizer.ggml")
    builders = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
    kind = values.text("model", "")
    if kind not in builders:
        raise ValueError(
            f"{header.file} has a tokenizer of kind {kind!r}; supported are {', '.join(builders)}"
        )
    tokens = values.texts("tokens")
    tokenizer = builders[kind](values, tokens)
    add_special_tokens(tokenizer, values, tokens)
    is_llama = kind == "llama" or values.value("pre") == "llama-bpe"
    add_bos(tokenizer, values, tokens, default=is_llama)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{name}_token": tokens[index]
        for name, key in names.items()
        if (index := values.index(f"{key}_token_id", len(tokens))) is not None
    }
    make: Any = PreTrainedTokenizerFast  # untyped
    built: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        chat_template=Section(header, "tokenizer").text("chat_template", "") or None,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **named,
    )
    return built


def byte_level_bpe(values: Section, tokens: list[str]) -> Tokenizer:
    """GPT-2's kind: bytes as printable characters, merges in order."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = merges_in_order(values, vocabulary)
    pre = values.text("pre", "default")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in {"llama-bpe", "llama3"}))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = word_splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def merges_in_order(values: Section, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs to join; both parts and the result must be tokens."""
    merges: list[tuple[str, str]] = []
    for position, merge in enumerate(values.texts("merges")):
        left, space, right = merge.partition(" ")
        if not space or not vocabulary.keys() >= {left, right, left + right}:
            expected = "two tokens with a space between, which joined are a token too"
            raise values.error(f"merges[{position}]", merge, expected)
        merges.append((left, right))
    return merges


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


def sentencepiece_bpe(values: Section, tokens: list[str]) -> Tokenizer:
    """SentencePiece's kind: spaces are letters, unknown characters fall back to bytes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = merges_from_scores(vocabulary, values.numbers("scores", len(tokens)))
    unknown = tokens[values.index("unknown_token_id", len(tokens)) or 0]
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = values.flag("add_space_prefix", True)
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


def add_special_tokens(tokenizer: Tokenizer, values: Section, tokens: list[str]) -> None:
    """Control tokens are matched whole and left out of text; user-defined ones stay in it."""
    if values.value("token_type") is None:
        return
    for token, kind in zip(tokens, values.numbers("token_type", len(tokens)), strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def add_bos(tokenizer: Tokenizer, values: Section, tokens: list[str], default: bool) -> None:
    """Put the first token before every text, where the file asks for it."""
    index = values.index("bos_token_id", len(tokens))
    if index is None or not values.flag("add_bos_token", default):
        return
    bos = tokens[index]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
    )

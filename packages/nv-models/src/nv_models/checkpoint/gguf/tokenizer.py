"""The tokenizer that a GGUF file carries, as one that transformers loads.

Owns the two kinds (byte-level BPE, SentencePiece BPE) and each family's way to cut text into words,
for which GGUF has only a name. Never tokenizes.
"""

from collections.abc import Mapping
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

from nv_models.checkpoint.gguf.ends import KEYS as END_KEYS
from nv_models.checkpoint.gguf.ends import SPM_EOS, end_texts
from nv_models.checkpoint.gguf.header import Header
from nv_models.checkpoint.gguf.section import Section
from nv_models.checkpoint.gguf.vocabulary import (
    CONTROL,
    SPACE,
    UNNAMED,
    USER_DEFINED,
    check_letters,
    token_list,
    token_types,
)

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
"""Letters that a word may begin with, and that it may end with, where case ends a word."""
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED_WORDS = (
    f"{BEFORE}[{UPPER}]*[{LOWER}]+{AFTER}|{BEFORE}[{UPPER}]+[{LOWER}]*{AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4o's words, which are GPT-OSS's (openai/tiktoken, o200k_base)."""
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
"""Names of one way to cut text; its texts begin with BOS."""
WHOLE_WORDS = (*LLAMA3, "glm4")
"""Names for which a word that is a token is one, whatever the merges would make of it."""
DIGITS_A_WORD = {"qwen2": "", **dict.fromkeys((*WHOLE_WORDS, "chatglm-bpe"), "{1,3}")}
CASED = "gpt-4o"
PLAIN_PRE_TOKENIZERS = ("smollm", "gpt-2", "exaone4", UNNAMED)
UNNAMED_WORDS = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""llama.cpp's words where a file names none, each within the pieces of the one before."""
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens, and GGUF's."""
SPM_IDS = {"bos": 1, "eos": SPM_EOS, "unk": 0}
"""Those of a SentencePiece vocabulary that names none, as in llama.cpp."""
PHI3_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
"""Of Phi-3's special tokens, those that leave the white space after them in the text."""
UNUSED = (
    "seperator_token_id",
    "mask_token_id",
    "cls_token_id",
    "fim_pre_token_id",
    "fim_suf_token_id",
    "fim_mid_token_id",
    "prefix_token_id",
    "suffix_token_id",
    "middle_token_id",
)
"""Keys of ids that no prompt and no end depends on."""
KNOWN = frozenset(
    (
        *END_KEYS,
        *UNUSED,
        *(f"{key}_token_id" for key in NAMES.values()),
        *("model", "pre", "tokens", "token_type", "scores", "merges"),
        *("add_bos_token", "add_eos_token", "add_space_prefix"),
        *("remove_extra_whitespaces", "precompiled_charsmap"),
        *("add_sep_token", "token_type_count"),  # of encoders, and of pairs of texts
    )
)


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
    refuse_unknown(values)
    tokens = token_list(values, header.tensors["token_embd.weight"].shape[0])
    for key in UNUSED:
        values.index(key, len(tokens))
    check_letters(values, frozenset(tokens))
    tokenizer = builders[kind](values, tokens)
    add_special_tokens(tokenizer, values, tokens)
    special = special_ids(values, len(tokens), SPM_IDS if kind == "llama" else {})
    is_llama = kind == "llama" or values.value("pre") in LLAMA3
    surround(
        tokenizer,
        tokens,
        bos=special.get("bos") if values.flag("add_bos_token", is_llama) else None,
        eos=special.get("eos") if values.flag("add_eos_token", False) else None,
    )
    make: Any = PreTrainedTokenizerFast  # untyped
    built: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        chat_template=chat_templates(header),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[index] for name, index in special.items()},
    )
    return built


def refuse_unknown(values: Section) -> None:
    """Raise ValueError for a key that would change tokens here, if it were read."""
    prefix = f"{values.name}."
    for key in values.header.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in KNOWN:
            raise ValueError(f"{values.header.file} holds {key}, which is not supported")
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if values.value(key):
            raise ValueError(
                f"{values.header.file} holds {prefix}{key}, which is not supported: it changes a "
                "text before it is cut"
            )


def special_ids(values: Section, count: int, defaults: Mapping[str, int]) -> dict[str, int]:
    """The ids of the special tokens that have one, by transformers' names."""
    given = {name: values.index(f"{key}_token_id", count) for name, key in NAMES.items()}
    ids = {n: defaults.get(n) if index is None else index for n, index in given.items()}
    return {name: index for name, index in ids.items() if index is not None and index < count}


def chat_templates(header: Header) -> str | dict[str, str] | None:
    """The chat template; where there are several, each by its name."""
    values = Section(header, "tokenizer")
    default = values.text("chat_template", "")
    prefix = "tokenizer.chat_template."
    named = [key.removeprefix(prefix) for key in header.metadata if key.startswith(prefix)]
    if not named:
        return default or None
    texts = {name: values.text(f"chat_template.{name}") for name in named}
    return {"default": default, **texts} if default else texts


def byte_level_bpe(values: Section, tokens: list[str]) -> Tokenizer:
    """GPT-2's kind: bytes as printable characters, merges in order."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = merges_in_order(values, vocabulary)
    pre = values.text("pre", "") or UNNAMED
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = word_splitter(values, pre)
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


def word_splitter(values: Section, pre: str) -> pre_tokenizers.PreTokenizer:
    """How a family cuts text into words before BPE, by `tokenizer.ggml.pre`.

    Raises:
        ValueError: an unknown name; guessing would silently give other tokens.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in {"gpt-2", "exaone4"}:
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    patterns = {CASED: (CASED_WORDS,), UNNAMED: UNNAMED_WORDS} | {
        name: (WORDS % digits,) for name, digits in DIGITS_A_WORD.items()
    }
    if pre in patterns:
        words = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns[pre]]
        raw_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*words, raw_bytes])
    known = ", ".join([*PLAIN_PRE_TOKENIZERS, *DIGITS_A_WORD, CASED])
    raise ValueError(
        f"{values.header.file}: tokenizer.ggml.pre {pre!r} is not supported; supported are {known}"
    )


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
    """Control tokens are matched whole and left out of text; user-defined ones stay in it.

    A token that ends a text is a control token, whatever its type. The white space after a
    token of Phi-3 belongs to it; llama.cpp knows that by the model's name, as no key has it.
    """
    kinds = token_types(values, len(tokens))
    ends = end_texts(tokens)
    is_phi3 = values.header.architecture == "phi3" and values.text("model") == "llama"
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == CONTROL or token in ends:
            strips = is_phi3 and token not in PHI3_KEEP_SPACE
            added = AddedToken(token, special=True, normalized=False, rstrip=strips)
            tokenizer.add_special_tokens([added])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def surround(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Put BOS before every text and EOS after it, each where it has an id."""
    if bos is None and eos is None:
        return
    first = [] if bos is None else [tokens[bos]]
    last = [] if eos is None else [tokens[eos]]

    def around(text: str, kind: int) -> list[str]:
        return [f"{piece}:{kind}" for piece in (*first, text, *last)]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=[*around("$A", 0), *around("$B", 1)],
        special_tokens=[(tokens[index], index) for index in {bos, eos} if index is not None],
    )

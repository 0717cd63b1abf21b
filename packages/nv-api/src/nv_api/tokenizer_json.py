"""The tokenizer of a tokenizer.json, unchanged, as a tokenizer of transformers.

transformers' own classes (such as LlamaTokenizer) take only the vocabulary and the merges from
tokenizer.json and build the rest of the pipeline themselves; with a wrong class name every prompt
is garbled. Here the pipeline stays as it is, and the other files only give names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nv_engine.user_line import warn_user
from nv_models.byte_level import BYTE_OF_CHARACTER, TEXT_CHARACTERS
from nv_models.listing import first_few
from nv_models.pointer import refuse_pointer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel, WordPiece

from nv_api.chat_templates import template_of
from nv_api.labels import Labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JSON = "tokenizer.json"
PROBE = "hi there\n é"
"""Cut and made again: a space, a line's end, and a character of two bytes."""
ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
NAME = re.compile(r"<.*>|\[.*\]")
"""A word that stands for something else than its text, as <unused7> and <0x0A>: no merge makes it.
"""
LEAST_WORDS, MOST_WORDS = 16, 1024
"""Words of a vocabulary whose merges are tried; fewer than the first may be anything."""
LEAST_MADE = 0.98
"""Share of them that merges must make: those of SmolLM2, Llama 3, Qwen 2.5, Qwen 3, Gemma, Gemma 3
and DeepSeek V3 make all, but one word of Gemma 3."""
BYTE_LEVEL = {byte: letter for letter, byte in BYTE_OF_CHARACTER.items()}


def tokenizer_of_json(folder: Path) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer that cuts texts exactly by the folder's tokenizer.json.

    `add_bos_token` and `add_eos_token` of tokenizer_config.json make no difference: as in
    transformers 5, the post-processor of tokenizer.json adds the tokens around a text. Nor do
    `add_prefix_space`, `legacy` and `split_special_tokens`.

    Raises:
        ValueError: a file with the wrong content, or added tokens that do not fit.
        Exception: the tokenizers library's own, for a damaged tokenizer.json.

    Warns:
        UserWarning: a named special token that tokenizer.json does not have, a byte-level
            vocabulary without a byte of plain text, or merges that do not make its words.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # seconds to import

    words = _read(folder / JSON)
    labels = Labels.read(folder)
    _add(words, labels.added, folder)
    _check_ids_around(words, folder / JSON)
    special = _known(words, labels.special, folder)
    matched = {token.content: token for token in words.get_added_tokens_decoder().values()}
    make: Any = PreTrainedTokenizerFast  # untyped
    backend: PreTrainedTokenizerFast = make(
        tokenizer_object=words,
        chat_template=template_of(folder),
        extra_special_tokens=[matched[text] for text in labels.extra if text in matched],
        **{name: matched[text] for name, text in special.items() if text in matched},
        **labels.values,
    )
    for name, text in special.items():
        if text not in matched:  # given to the constructor, it would be searched for in texts
            setattr(backend, name, text)
    backend.name_or_path = str(folder)  # not earlier: the constructor would look it up in the hub
    return backend


def is_of_tokenizers(error: BaseException) -> bool:
    """Whether an error is one of the tokenizers library: Exception itself, or a panic of Rust's."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _read(file: Path) -> Tokenizer:
    """The tokenizers library's tokenizer, without truncation and padding."""
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty")
    refuse_pointer(file)
    try:
        words = Tokenizer.from_file(str(file))
    except BaseException as error:
        if is_of_tokenizers(error):
            raise ValueError(f"{file} is damaged: {error}") from error
        raise
    words.no_truncation()
    words.no_padding()
    if getattr(words.model, "dropout", None):  # for training: each call would cut anew
        words.model.dropout = None
    _check_vocabulary(words, file)
    _check_ids(words, file)
    _check_round_trip(words, file)
    _check_merges(words, file)
    return words


def _check_vocabulary(words: Tokenizer, file: Path) -> None:
    """Check that texts can be cut into tokens.

    Raises:
        ValueError: there are no tokens but added ones, which cut no text.

    Warns:
        UserWarning: a byte-level vocabulary without a byte of plain text, which then vanishes.
    """
    added = {token.content for token in words.get_added_tokens_decoder().values()}
    size = words.get_vocab_size(with_added_tokens=False)
    if size <= len(added) and words.get_vocab(with_added_tokens=False).keys() <= added:
        raise ValueError(f"{file} has no tokens, or only added ones, which cut no text")
    if type(words.decoder).__name__ != "ByteLevel":
        return
    pairs = TEXT_CHARACTERS.items()
    lost = [f"0x{byte:02X}" for byte, letter in pairs if words.token_to_id(letter) is None]
    if lost:
        warn_user(
            f"{file}: the vocabulary has no token for the byte {', '.join(first_few(lost))}, which "
            "vanishes from texts: if the model was trained with such a token, download the file "
            "again"
        )


def _check_ids(words: Tokenizer, file: Path) -> None:
    """Check that each token has the id that the model knows it by.

    Raises:
        ValueError: the token of unknown words is not in the vocabulary.

    Warns:
        UserWarning: the tokenizers library gives an added token another id than the file, as it
            does where the vocabulary leaves ids out.
    """
    found = [(text, index, words.token_to_id(text)) for text, index in _added_ids(file)]
    if wrong := [f"{text!r} ({index}, {own})" for text, index, own in found if own != index]:
        warn_user(
            f"{file}: the tokenizers library gives added tokens other ids than the file, and its "
            f"ids are used: {', '.join(first_few(wrong))}; correct the ids, or the vocabulary if "
            "it leaves ids out"
        )
    model = words.model
    if isinstance(model, WordLevel | WordPiece) and model.token_to_id(model.unk_token) is None:
        raise ValueError(
            f"{file} has the unk_token {model.unk_token!r}, which is not in its model's "
            "vocabulary: it stands for each word that is not there, so add it"
        )


def _added_ids(file: Path) -> list[tuple[str, int]]:
    """The added tokens and their ids as the file has them, read without its vocabulary."""
    text = file.read_text(encoding="utf-8")
    for found in ADDED.finditer(text):
        try:
            tokens, _ = json.JSONDecoder().raw_decode(text, found.end() - 1)
            return [(token["content"], token["id"]) for token in tokens]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # the name is a word of the vocabulary
    return []


def _check_round_trip(words: Tokenizer, file: Path) -> None:
    """Check that a byte-level tokenizer makes the text again that it has cut.

    Raises:
        ValueError: two tokens have one id, or a step of the pipeline is missing or of another kind.
    """
    ids = words.get_vocab(with_added_tokens=False)
    if len(set(ids.values())) < len(ids):
        raise ValueError(
            f"{file} gives two tokens one id ({len(ids)} tokens have {len(set(ids.values()))} ids)"
        )
    letters = [BYTE_LEVEL[byte] for byte in PROBE.encode()]
    if not all(letter in ids for letter in letters):
        return  # another alphabet, or a vocabulary that was warned of
    text = words.decode(words.encode(PROBE, add_special_tokens=False).ids)
    if text.strip() != PROBE:
        raise ValueError(
            f"{file} has a byte-level vocabulary, and cuts {PROBE!r} so that it becomes {text!r}: "
            "its pre_tokenizer and its decoder must both be byte-level"
        )


def _check_merges(words: Tokenizer, file: Path) -> None:
    """Check that the merges of a BPE make the words of its vocabulary again, in a sample of them.

    Each word of a trained vocabulary was made by a merge, so nearly all are; with merges that are
    lost or in another order, texts are cut into other tokens than those the model was trained with.

    Raises:
        ValueError: none is made.

    Warns:
        UserWarning: fewer than LEAST_MADE of them are.
    """
    model = words.model
    if not isinstance(model, BPE) or model.end_of_word_suffix or model.continuing_subword_prefix:
        return
    size = words.get_vocab_size(with_added_tokens=False)
    added = {token.content for token in words.get_added_tokens_decoder().values()}
    spread = [words.id_to_token(index) for index in range(0, size, 1 + size // MOST_WORDS)]
    sample = [word for word in spread if word and word not in added and _is_merged(word, words)]
    count = sum(len(model.tokenize(word)) == 1 for word in sample)
    if len(sample) < LEAST_WORDS or count >= LEAST_MADE * len(sample):
        return
    message = (
        f"{file}: its merges make {count} of {len(sample)} words of its vocabulary, so that texts "
        "are cut into other tokens than the model was trained with: merges are missing or in "
        "another order; download the file again"
    )
    if not count:
        raise ValueError(message)
    warn_user(message)


def _is_merged(word: str, words: Tokenizer) -> bool:
    """Whether a word is made of letters that the vocabulary has, and not a name."""
    is_made = len(word) > 1 and not NAME.fullmatch(word)
    return is_made and all(words.token_to_id(letter) is not None for letter in word)


def _add(words: Tokenizer, added: Mapping[int, AddedToken], folder: Path) -> None:
    """Add the tokens that tokenizer.json lacks, each at its own id."""
    for index, token in added.items():
        if (known := words.token_to_id(token.content)) is not None:
            if known != index:
                warn_user(
                    f"{folder}: tokenizer_config.json or added_tokens.json gives {token.content!r} "
                    f"the id {index}, and tokenizer.json {known}: {known} is used"
                )
            continue
        words.add_tokens([token])
        if (got := words.token_to_id(token.content)) != index:
            raise ValueError(
                f"tokenizer_config.json or added_tokens.json gives {token.content!r} the id "
                f"{index}, and the next id of tokenizer.json is {got}: correct one of them in "
                f"{folder}"
            )


def _check_ids_around(words: Tokenizer, file: Path) -> None:
    """Check the ids that the post-processor adds to a text, and to a pair of texts.

    Raises:
        ValueError: no token has one of them, so that every prompt would be refused.
    """
    ids = {*words.encode("").ids, *words.encode("", "").ids}
    if unknown := sorted(token for token in ids if words.id_to_token(token) is None):
        raise ValueError(
            f"the post_processor of {file} adds the token id {unknown[0]} to texts, which no token "
            "has: correct it"
        )


def _known(words: Tokenizer, special: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The named tokens that the tokenizer has."""
    unknown = {n: text for n, text in special.items() if words.token_to_id(text) is None}
    if unknown:
        named = ", ".join(f"{name} {text!r}" for name, text in unknown.items())
        warn_user(
            f"{folder}: tokenizer_config.json names {named}, which tokenizer.json does not have: "
            "left out"
        )
    return {name: text for name, text in special.items() if name not in unknown}

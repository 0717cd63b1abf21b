"""Tokenizer: one checkpoint's tokenizer, loaded, and the detokenizers that belong to it.

Owns the bytes of each token, and which tokens are special. Never decides which values are prompts.
"""

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nv_engine.values import shown
from nv_models.byte_level import BYTE_OF_CHARACTER
from nv_models.checkpoint.gguf.folder import source_of
from nv_models.hub import download
from nv_models.locate import TOKENIZER_FILES
from nv_models.missing import path_of, why_missing
from nv_models.turns import TOKENIZERS

from nv_api.bounded_template import NUM_TEMPLATES
from nv_api.chat_templates import check_templates
from nv_api.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from nv_api.token_bound import TokenBound
from nv_api.tokenizer_json import JSON, is_of_tokenizers, tokenizer_of_json

if TYPE_CHECKING:
    from nv_engine import SamplingParams
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FILES = (JSON, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
BESIDE = f"put the model's {JSON} beside them"
NO_CLASS = "Couldn't instantiate the backend tokenizer"
"""The beginning of transformers' error when it has no class for the files."""
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")
"""The first line of tiktoken's files: a token in base64, and its rank."""
KIND_FIELDS = ("model_type", "model_name", "tokenizer_class")
MODES = ("auto", "hf")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that is one byte, in tokenizers that are not byte-level."""
NUM_WORDS = 4096
"""Words whose ids are cached."""
REMEDY = (
    "give a tokenizer's place with tokenizer=…, or pass skip_tokenizer_init=True to work with "
    "token ids"
)
TEXT_FILES = ("*.json", "*.txt", "**/*.jinja")
LOADING_ERRORS = (OSError, ValueError, TypeError, AttributeError, LookupError)
"""Errors of transformers for damaged files; its Rust part raises Exception itself."""


def load_tokenizer(
    source: Path | str, *, mode: str = "auto", revision: str | None = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder or a hub name.

    If there is a tokenizer.json, it is the tokenizer, whatever class the other files name.

    Args:
        source: a folder with tokenizer files, or a hub name.
        mode: "auto" or "hf": the checkpoint's own; other modes are not built.
        revision: branch, tag or commit of a hub name.

    Raises:
        FileNotFoundError: a folder that does not exist or has no tokenizer files, or a hub name
            that is neither in the hub nor in its cache.
        NotImplementedError: another mode.
        ValueError: files that are not a tokenizer, or that need a library which is not installed;
            a chat template that is not Jinja; an unknown hub name; or code of the checkpoint's own,
            which is never run.
    """
    if mode not in MODES:
        raise NotImplementedError(f"tokenizer_mode={mode!r} is not built yet: use 'auto'")
    path = path_of(source, "tokenizer")
    if not path.is_dir():
        if not HUB_NAME.fullmatch(str(source)):
            raise FileNotFoundError(
                f"the tokenizer {source} is neither a folder nor a hub name: {REMEDY}"
            )
        path = _downloaded(str(source), revision)
    for file in map(path.joinpath, FILES):
        if not file.is_file() and (file.exists() or file.is_symlink()):
            raise FileNotFoundError(f"{file} {why_missing(file, 'does not exist')}: {REMEDY}")
    if not (path / JSON).exists():
        _check_readable(path)
    with TOKENIZERS:
        with _Loading(source):
            backend = tokenizer_of_json(path) if (path / JSON).exists() else _by_class(path)
            _check_values(backend)
        check_templates(backend.chat_template, source_of(path))
    return backend


def existing(tokenizer: "Tokenizer | None") -> "Tokenizer":
    """The tokenizer, which a call needs.

    Raises:
        ValueError: there is none (`skip_tokenizer_init=True`).
    """
    if tokenizer is None:
        raise ValueError("there is no tokenizer (skip_tokenizer_init=True): leave the option out")
    return tokenizer


def _check_values(backend: "PreTrainedTokenizerBase") -> None:
    """Check values of tokenizer_config.json that transformers would fail on at the first text.

    Raises:
        ValueError: one of another type.
    """
    length, names = backend.model_max_length, backend.model_input_names
    if not isinstance(length, int | float):
        raise ValueError(f"model_max_length is {shown(length)}: it must be a number")
    if not isinstance(names, list | tuple):
        raise ValueError(f"model_input_names is {shown(names)}: it must be a list of names")


def _check_readable(folder: Path) -> None:
    """Check that the tokenizer of a folder without tokenizer.json can be read correctly.

    Raises:
        FileNotFoundError: the folder has no tokenizer files.
        ValueError: they need a library that is not installed, or lack the rule that cuts texts.
    """
    model = folder / "tokenizer.model"
    tiktoken = [*sorted(folder.glob("*.tiktoken")), *sorted(folder.glob("tiktoken.model"))]
    if model.exists():
        with model.open("rb") as stream:
            tiktoken += [model] if TIKTOKEN_LINE.fullmatch(stream.readline()) else []
    if tiktoken:
        raise ValueError(
            f"{tiktoken[0]} is a file of tiktoken, which lacks the rule that cuts a text into "
            f"words: put the model's {JSON} beside it, or {REMEDY}"
        )
    if not any((folder / name).exists() for name in FILES):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer (none of {', '.join(FILES)}): {REMEDY}"
        )
    libraries = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
    lacking = [name for name, module in libraries.items() if not _is_installed(module)]
    others = any((folder / name).exists() for name in FILES if name not in {JSON, model.name})
    if model.exists() and not others and lacking:
        raise ValueError(
            f"{model} is a SentencePiece model, which takes {' and '.join(lacking)} to read: "
            f"pip install {' '.join(lacking)}, or put a {JSON} beside it"
        )


def _is_installed(module: str) -> bool:
    """Whether a module is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False


def _by_class(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that transformers' class makes of older files.

    Raises:
        ValueError: vocab.json without a byte-level class for it: another class loses text.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415  # seconds to import, and not always needed

    try:
        backend: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, config=_kind(folder), trust_remote_code=False
        )
    except ValueError as error:
        if NO_CLASS not in str(error):
            raise
        raise ValueError(
            f"none of them has the rule that cuts a text into words; {BESIDE}"
        ) from error
    if (folder / "vocab.json").exists() and _decoder_name(backend) != "ByteLevel":
        raise ValueError(
            f"vocab.json is of a byte-level tokenizer, which {type(backend).__name__} is not; "
            f"{BESIDE}"
        )
    return backend


def _downloaded(name: str, revision: str | None) -> Path:
    """The folder of a hub name's tokenizer files; without a network it fails at once."""
    try:
        return download(name, revision, TOKENIZER_FILES)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"the tokenizer {name} cannot be loaded ({error}): {REMEDY}") from error


def _kind(folder: Path) -> "PreTrainedConfig":
    """The values of config.json that a tokenizer's class depends on.

    The others are left out, so that wrong sizes of the model are reported by the model's loader.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: PLC0415  # as above

    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8-sig")) if file.exists() else {}
    named: dict[str, Any] = {
        key: value for key in KIND_FIELDS if isinstance(value := values.get(key), str)
    }
    named["name_or_path"] = str(folder)
    if (kind := named.get("model_type", "")) not in CONFIG_MAPPING:
        return PreTrainedConfig(**named)
    del named["model_type"]
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**named)
    return config


class _Loading:
    """Replaces errors of loading by errors that name the tokenizer and the fix."""

    def __init__(self, source: Path | str) -> None:
        self._source = source

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or kind is None:
            return
        if not (is_of_tokenizers(error) or issubclass(kind, LOADING_ERRORS)):
            return
        if issubclass(kind, OSError):
            raise FileNotFoundError(
                f"the tokenizer {self._source} cannot be loaded ({error}): {REMEDY}"
            ) from error
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer of {self._source} is code of its own, which is never run: {REMEDY}"
            ) from None
        if named := _not_utf8(self._source):
            raise ValueError(f"{named} is not UTF-8: write it anew, or {REMEDY}") from error
        raise ValueError(
            f"the files of {self._source} are not a tokenizer ({kind.__name__}: {error}): download "
            f"them again, or {REMEDY}"
        ) from error


def _not_utf8(source: Path | str) -> Path | None:
    """The first of a folder's text files that is not UTF-8."""
    for pattern in TEXT_FILES:
        for file in sorted(Path(source).glob(pattern)):
            try:
                file.read_text(encoding="utf-8")
            except ValueError:
                return file
    return None


class Tokenizer:
    """A tokenizer as the processor uses it: ids of texts, and texts of ids.

    Args:
        backend: the transformers tokenizer; users get it as `llm.tokenizer`.
    """

    def __init__(self, backend: "PreTrainedTokenizerBase") -> None:
        self.backend = backend
        added = backend.added_tokens_decoder.items()
        special = {token for token, content in added if content.special}
        self._special = frozenset(special | set(backend.all_special_ids))
        self._is_byte_level = _decoder_name(backend) == "ByteLevel"
        self._pieces: dict[bool, _Pieces] = {}
        self._texts: dict[int, str] = {}
        self.word_ids = lru_cache(NUM_WORDS)(self._word_ids)
        self._checked_templates: set[str] = set()

    @property
    def num_ids(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self.backend.get_vocab().values(), default=-1)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's own EOS, if it has one."""
        eos = self.backend.eos_token_id
        return () if eos is None else (int(eos),)

    @cached_property
    def bound(self) -> TokenBound:
        """The least number of tokens of a text; made when the first long one comes."""
        return TokenBound(self.backend)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, with the tokenizer's first and last special tokens if wanted.

        Raises:
            ValueError: the tokenizer has no tokens for one of them.
        """
        if not texts:
            return []
        return self._cut(list(texts), add_special_tokens=add_special_tokens)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Token ids of pairs of texts, with the special tokens that the tokenizer puts around.

        Raises:
            ValueError: as `encode`.
        """
        firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
        return self._cut(firsts, seconds)

    def _cut(self, *texts: list[str], **options: bool) -> list[list[int]]:
        """Token ids of texts, or of pairs of texts."""
        try:
            # Not verbose: it would warn of texts beyond the tokenizer's idea of a model's length.
            encoded = self.backend(*texts, verbose=False, **options)
        except BaseException as error:
            if not is_of_tokenizers(error):
                raise
            several = len(texts[0]) > 1
            text = "one of the texts" if several else f"the text {shown(texts[0][0])}"
            raise ValueError(
                f"the tokenizer cannot cut {text} into tokens ({error}): give a tokenizer with a "
                "token for unknown characters as tokenizer=…, or pass token ids"
            ) from error
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def is_checked(self, template: str) -> bool:
        """Whether a call's chat template was checked with this tokenizer."""
        return template in self._checked_templates

    def note_checked(self, template: str) -> None:
        """Remember that a call's chat template was checked; of many, the newest are kept."""
        if len(self._checked_templates) >= NUM_TEMPLATES:
            self._checked_templates.clear()
        self._checked_templates.add(template)

    def token_text(self, token_id: int) -> str:
        """A token's own text; a replacement character if the token is part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = _decode(self.backend, [token_id], True)
        return text

    def shown_text(self, token_id: int) -> str:
        """As `token_text`; "" for a special token, which answers leave out by default."""
        return "" if token_id in self._special else self.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; b"" past the vocabulary.

        A token may be a part of a character: its text is a replacement character then.
        """
        token = self.backend.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._is_byte_level:
            return _token_bytes(token)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else self.token_text(token_id).encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return _decode(self.backend, list(token_ids), True)

    def _word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Ids that spell a word at the beginning of a text, and after a space.

        vLLM omits the second if its number of tokens differs; here both are kept.
        """
        bare = word.lstrip()
        spellings = self.encode([bare, f" {bare}"] if bare else [word], add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))

    def detokenizer(self, params: "SamplingParams", prompt_token_ids: Sequence[int]) -> Detokenizer:
        """A detokenizer for one completion of a prompt."""
        skipped = self._special if params.skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            pieces = self._pieces.setdefault(
                params.skip_special_tokens, _Pieces(self.backend, skipped)
            )
            return ByteDetokenizer(pieces.__getitem__)
        spaced = params.spaces_between_special_tokens
        return WindowDetokenizer(
            lambda ids: _decode(self.backend, ids, spaced),
            lambda token: token not in skipped,
            prompt_token_ids,
        )


class _Pieces(dict[int, bytes]):
    """Bytes of each token id of a byte-level tokenizer, computed once per id."""

    def __init__(self, backend: "PreTrainedTokenizerBase", skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.convert_ids_to_tokens(token_id)
        if token_id in self._skipped or not isinstance(token, str):  # None: past the vocabulary
            token = ""
        piece = self[token_id] = _token_bytes(token)
        return piece


def _token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token outside that alphabet is its own UTF-8."""
    if all(character in BYTE_OF_CHARACTER for character in token):
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    return token.encode()


def _decoder_name(backend: "PreTrainedTokenizerBase") -> str:
    """Name of the step that turns token strings into text; "" for tokenizers written in Python."""
    rust = getattr(backend, "backend_tokenizer", None)
    return type(rust.decoder).__name__ if rust is not None else ""


def _decode(backend: "PreTrainedTokenizerBase", ids: list[int], spaced: bool) -> str:
    """The text of all ids, with spaces unchanged."""
    text = backend.decode(
        ids,
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=spaced,
    )
    assert isinstance(text, str)
    return text

"""The tokenizer of a tokenizer.json, as it is, in transformers' clothes.

transformers' own classes (LlamaTokenizer and its like) take only the vocabulary and the merges from
tokenizer.json and build the rest of the pipeline themselves; under a wrong label they garble every
prompt. Here nothing of the pipeline is replaced: the other files give names.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from nv_api.chat_templates import template_of
from nv_api.labels import Labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JSON = "tokenizer.json"
POINTER = b"version https://git-lfs"


def tokenizer_of_json(folder: Path) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer that cuts texts exactly as the folder's tokenizer.json says.

    `add_bos_token` and `add_eos_token` of tokenizer_config.json make no difference: as in
    transformers 5, what is put around a text is the post-processor's business, which is
    in tokenizer.json. So do `add_prefix_space`, `legacy` and `split_special_tokens`.

    Raises:
        ValueError: a file that is not what its name says, or added tokens that do not fit.
        Exception: the tokenizers library's own, of a damaged tokenizer.json.

    Warns:
        UserWarning: a named special token that tokenizer.json does not have.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # seconds to import

    words = _read(folder / JSON)
    labels = Labels.read(folder)
    _add(words, labels.added, folder)
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
        if text not in matched:  # the constructor would have texts searched for it
            setattr(backend, name, text)
    backend.name_or_path = str(folder)  # not earlier: the constructor would ask the hub about it
    return backend


def _read(file: Path) -> Tokenizer:
    """The tokenizers library's tokenizer, which neither cuts a text short nor fills it up."""
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
    if not start:
        raise ValueError(f"{file} is empty")
    if start == POINTER:
        raise ValueError(f"{file} is a Git LFS pointer in place of the file: run `git lfs pull`")
    words = Tokenizer.from_file(str(file))
    if not words.get_vocab_size():
        raise ValueError(f"{file} has no tokens")
    words.no_truncation()
    words.no_padding()
    return words


def _add(words: Tokenizer, added: Mapping[int, AddedToken], folder: Path) -> None:
    """Add the tokens that tokenizer.json lacks, each at the id that it was given."""
    for index, token in added.items():
        if words.token_to_id(token.content) is not None:
            continue
        words.add_tokens([token])
        if (got := words.token_to_id(token.content)) != index:
            raise ValueError(
                f"tokenizer_config.json or added_tokens.json gives {token.content!r} the id "
                f"{index}, and the next id of tokenizer.json is {got}: mend one of them in {folder}"
            )


def _known(words: Tokenizer, special: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The named tokens that the tokenizer has."""
    unknown = {n: text for n, text in special.items() if words.token_to_id(text) is None}
    if unknown:
        named = ", ".join(f"{name} {text!r}" for name, text in unknown.items())
        warnings.warn(
            f"{folder}: tokenizer_config.json names {named}, which tokenizer.json does not have: "
            "left out",
            stacklevel=5,
        )
    return {name: text for name, text in special.items() if name not in unknown}

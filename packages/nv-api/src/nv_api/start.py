"""Start: from a model's name and its options to a session that is ready.

Owns the order of the start: options, config, tokenizer, weights. Each check comes as early as it
can, so that a wrong option costs no load of a model.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from nv_engine import Engine, EngineConfig, SamplingParams
from nv_models import (
    ModelConfig,
    PoolerConfig,
    describe,
    resolve,
)
from nv_models.checkpoint.gguf.folder import source_of

from nv_api import options as keywords
from nv_api.chat_check import check_chat
from nv_api.ends_check import check_ends
from nv_api.session import Session
from nv_api.tokenizer import Tokenizer, load_tokenizer


class Prepared(NamedTuple):
    """A model that is known, and not loaded."""

    engine: EngineConfig
    """The options of the engine."""
    tokenizer: Tokenizer | None
    """None: only token ids go in and come out."""
    default_params: SamplingParams
    """The checkpoint's recommendation."""
    own_length: int
    """Most tokens of a text of the model's."""
    length_place: str
    """Which field of which file gives that."""
    pooler: PoolerConfig | None
    """How prompts are pooled; None: the model generates text."""


class Started(NamedTuple):
    """A model that is ready to run requests."""

    session: Session
    """Owns the engine."""
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    pooler: PoolerConfig | None


def start(model: str, options: Mapping[str, Any]) -> Started:
    """Load a model; arguments and errors are those of `LLM`."""
    prepared = prepare(keywords.parse(model, options))
    keywords.warn_of_length(options, prepared.own_length, prepared.length_place)
    session = Session(Engine(prepared.engine), prepared.tokenizer)
    return Started(session, prepared.tokenizer, prepared.default_params, prepared.pooler)


def prepare(given: keywords.Options) -> Prepared:
    """Find a model's files and load its tokenizer; errors are those of `LLM`."""
    path = resolve(given.engine.model, given.engine.revision)
    config, pooler, _ = describe(  # first: it refuses what is not supported
        path,
        given.engine.hf_overrides,
        runner=given.engine.runner,
        convert=given.engine.convert,
        task=given.engine.task,
    )
    default_params = _default_params(path, config)
    tokenizer = None if given.skip_tokenizer_init else _tokenizer(given, path, config)
    if tokenizer:
        check_chat(tokenizer, source_of(Path(given.tokenizer or path)))
    if tokenizer and pooler is None:
        check_ends(path, config, tokenizer, given.tokenizer or path)
    engine = replace(
        given.engine,
        model=str(path),
        tokenizer_eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
        tokenizer_num_ids=tokenizer.num_ids if tokenizer else None,
    )
    return Prepared(
        engine, tokenizer, default_params, config.max_length, config.length_place, pooler
    )


def _default_params(path: Path, config: ModelConfig) -> SamplingParams:
    """Sampling values that a checkpoint recommends, and our defaults for the others.

    Its max_new_tokens becomes max_tokens, as in vLLM.

    Raises:
        ValueError: generation_config.json has a value out of range.
    """
    recommended = asdict(config.generation)
    recommended["max_tokens"] = recommended.pop("max_new_tokens")
    try:
        return SamplingParams(**{n: v for n, v in recommended.items() if v is not None})
    except ValueError as error:
        reason = str(error).replace("max_tokens", "max_new_tokens")  # its name in the file
        raise ValueError(
            f"{path / 'generation_config.json'}: {reason}; correct the file or remove the value"
        ) from error


def _tokenizer(given: keywords.Options, path: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of `tokenizer=`, else the model's own.

    Raises:
        ValueError: it has more ids than the model has embeddings; and as `load_tokenizer`.
    """
    source = given.tokenizer or path
    backend = load_tokenizer(source, mode=given.tokenizer_mode, revision=given.engine.revision)
    tokenizer = Tokenizer(backend)
    if tokenizer.num_ids > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source_of(Path(source))} has {tokenizer.num_ids} token ids and the "
            f"model of {source_of(path)} has a vocabulary of {config.vocab_size}: give the "
            "tokenizer that the model was trained with as tokenizer=…, or pass "
            "skip_tokenizer_init=True to work with token ids"
        )
    return tokenizer

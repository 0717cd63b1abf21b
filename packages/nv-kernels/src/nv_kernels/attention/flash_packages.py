"""The FlashAttention packages: which one is installed, what it supports, how it is called.

Owns their names, their arguments and what they do not compute. Never splits a step, and imports a
package only in `find`.

FlashAttention-3 (Shah et al. 2024) is used if it is installed and the card is a Hopper, else
FlashAttention-2 (Dao 2023). Version 3 reads whole blocks: the cache after a sequence's last token
must be finite, as `KVLayout.allocate` leaves it.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from nv_kernels.attention.metadata import AttentionShape, AttentionSpec
    from nv_kernels.cache.layout import KVCache

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
FLASH2_BLOCK_MULTIPLE = 256
ARGUMENTS = {"window": "window_size", "softcap": "softcap"}  # of both, since flash-attn 2.6
# FlashAttention-3 can be built without parts: flags of its module `flash_attn_config`.
LEFT_OUT = {
    "window": "FLASHATTENTION_DISABLE_LOCAL",
    "softcap": "FLASHATTENTION_DISABLE_SOFTCAP",
}
NEEDED = {
    "blocks (paged KV)": "FLASHATTENTION_DISABLE_PAGEDKV",
    "sequences of different lengths": "FLASHATTENTION_DISABLE_VARLEN",
}
FLASH3_HEAD_DIMS = (64, 96, 128, 192, 256)
INSTALL = (
    'install FlashAttention-2 with `pip install "nv-kernels[flash-attn]"`, or on a Hopper card a '
    "wheel of FlashAttention-3 that provides `flash_attn_interface`"
)


@dataclass(frozen=True)
class Rows:
    """Sequences of one call.

    Attributes:
        context_lens: [N] int32.
        block_tables: [N, W] int32, no wider than the bound on the contexts needs: the packages take
            the width as the longest context when they divide the work.
    """

    context_lens: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class Chunks:
    """Sequences of any number of queries.

    Attributes:
        rows: of the N sequences.
        query_start: [N+1] int32, of the query rows after the decode rows.
        context_start: [N+1] int32, the contexts' lengths summed.
        max_query_len: host bound.
        max_context_len: host bound.
    """

    rows: Rows
    query_start: torch.Tensor
    context_start: torch.Tensor
    max_query_len: int
    max_context_len: int


class Package(Protocol):
    """A version of the package. Both calls return attention of q over the cache, causal."""

    @property
    def title(self) -> str:
        """The version and the imported module."""

    @property
    def functions(self) -> tuple[Callable[..., torch.Tensor], ...]:
        """The functions that the calls below call."""

    @property
    def left_out(self) -> Collection[str]:
        """The features of a layer that the installed build was made without."""

    def decode(self, q: torch.Tensor, kv: KVCache, rows: Rows, spec: AttentionSpec) -> torch.Tensor:
        """Attend one query per sequence: q [N, Hq, D]."""

    def chunks(
        self, q: torch.Tensor, kv: KVCache, chunks: Chunks, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend packed queries: q [T, Hq, D]; rows after the last sequence's are undefined."""


@dataclass(frozen=True)
class Flash3:
    """FlashAttention-3, blocks of any size.

    Attributes:
        module: `flash_attn_interface`.
        left_out: features of a layer that the build was made without.
        title: the package's name in `reason`.
    """

    module: Any
    left_out: Collection[str] = ()
    title: str = "FlashAttention-3 (flash_attn_interface)"

    @property
    def functions(self) -> tuple[Callable[..., torch.Tensor], ...]:
        """See `Package`."""
        return (self.module.flash_attn_with_kvcache,)

    def decode(self, q: torch.Tensor, kv: KVCache, rows: Rows, spec: AttentionSpec) -> torch.Tensor:
        """See `Package`."""
        return _decode(self.module, q, kv, rows, spec, page_table=rows.block_tables)

    def chunks(
        self, q: torch.Tensor, kv: KVCache, chunks: Chunks, spec: AttentionSpec
    ) -> torch.Tensor:
        """See `Package`."""
        out: torch.Tensor = self.module.flash_attn_with_kvcache(
            q,
            kv.k,
            kv.v,
            cache_seqlens=chunks.rows.context_lens,
            page_table=chunks.rows.block_tables,
            cu_seqlens_q=chunks.query_start,
            max_seqlen_q=chunks.max_query_len,
            **_options(spec),
        )
        return out


@dataclass(frozen=True)
class Flash2:
    """FlashAttention-2, blocks of a multiple of 256 tokens.

    Attributes:
        module: `flash_attn`.
        left_out: see `Package`.
        title: the package's name in `reason`.
    """

    module: Any
    left_out: Collection[str] = ()
    title: str = "FlashAttention-2 (flash_attn)"

    @property
    def functions(self) -> tuple[Callable[..., torch.Tensor], ...]:
        """See `Package`."""
        return (self.module.flash_attn_with_kvcache, self.module.flash_attn_varlen_func)

    def decode(self, q: torch.Tensor, kv: KVCache, rows: Rows, spec: AttentionSpec) -> torch.Tensor:
        """See `Package`."""
        return _decode(self.module, q, kv, rows, spec, block_table=rows.block_tables)

    def chunks(
        self, q: torch.Tensor, kv: KVCache, chunks: Chunks, spec: AttentionSpec
    ) -> torch.Tensor:
        """See `Package`."""
        out: torch.Tensor = self.module.flash_attn_varlen_func(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=chunks.query_start,
            cu_seqlens_k=chunks.context_start,
            max_seqlen_q=chunks.max_query_len,
            max_seqlen_k=chunks.max_context_len,
            **_options(spec),
            block_table=chunks.rows.block_tables,
        )
        return out


def _decode(
    module: Any,  # noqa: ANN401  an optional package
    q: torch.Tensor,
    kv: KVCache,
    rows: Rows,
    spec: AttentionSpec,
    **tables: torch.Tensor,
) -> torch.Tensor:
    """Attend one query per sequence; the versions differ only in the tables' name."""
    lens = rows.context_lens
    out: torch.Tensor = module.flash_attn_with_kvcache(
        q[:, None], kv.k, kv.v, cache_seqlens=lens, **_options(spec), **tables
    )  # [N, 1, Hq, D]
    return out[:, 0]


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Return the arguments that describe a layer: of features only those that are in use."""
    options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": True}
    if spec.window is not None:
        options["window_size"] = (spec.window - 1, 0)  # keys before and after the query's own
    if spec.softcap is not None:
        options["softcap"] = spec.softcap
    return options


def _build_flags() -> Mapping[str, bool]:
    """Return the flags of the installed FlashAttention-3's build; {} if it does not list them."""
    try:
        config = importlib.import_module("flash_attn_config").CONFIG
        return dict(config["build_flags"])
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def _lacks(flags: Mapping[str, bool], shape: AttentionShape) -> str | None:
    """Return what a shape needs and a build was made without; None if it has all."""
    for name, flag in NEEDED.items():
        if flags.get(flag):
            return name
    if shape.dtype == torch.float16 and flags.get("FLASHATTENTION_DISABLE_FP16"):
        return "float16"
    built = [dim for dim in FLASH3_HEAD_DIMS if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{dim}")]
    if shape.head_dim > max(built, default=0):
        return f"heads of {shape.head_dim} dimensions"
    return None


def refusal(package: Package, spec: AttentionSpec) -> str | None:
    """Return why a package cannot compute layers of a spec, in one sentence; None if it can."""
    for feature in spec.features:
        argument = ARGUMENTS.get(feature)
        if argument is None:
            return f"attention backend 'flash_attn' has no {feature}: use 'triton'"
        if feature in package.left_out:
            return (
                f"attention backend 'flash_attn' has no {feature}: the installed {package.title} "
                "was built without it; install another build, or use 'triton'"
            )
        for function in package.functions:
            if argument not in inspect.signature(function).parameters:
                return (
                    f"attention backend 'flash_attn' has no {feature}: the installed "
                    f"{package.title} has no argument {argument!r}; install a newer one, or use "
                    "'triton'"
                )
    return None


def _check_heads(shape: AttentionShape) -> None:
    """Raise for heads and dtypes that no version supports."""
    if shape.dtype not in DTYPES:
        raise ValueError(
            f"dtype is {shape.dtype}: attention backend 'flash_attn' takes bfloat16 or float16; "
            "use 'torch'"
        )
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"head_dim is {shape.head_dim}: attention backend 'flash_attn' needs a multiple of "
            f"{HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}; use 'torch'"
        )


def find(shape: AttentionShape) -> Package:
    """Pick the newest version that can be imported and supports the card.

    Args:
        shape: the attention to compute.

    Returns:
        The package.

    Raises:
        ValueError: none can be imported, or the one found does not support the dtype, head_dim,
            block size or card.
    """
    _check_heads(shape)
    capability = (9, 0)
    if shape.device.type == "cuda":
        capability = torch.cuda.get_device_capability(shape.device)
    missing = [f"flash_attn_interface is for Hopper cards (9.x), not {capability[0]}.x"]
    if capability[0] == 9:
        try:
            module = importlib.import_module("flash_attn_interface")
        except ImportError as error:
            missing = [f"flash_attn_interface cannot be imported ({error})"]
        else:
            flags = _build_flags()
            lacks = _lacks(flags, shape)
            if lacks is None:
                return Flash3(module, [name for name, flag in LEFT_OUT.items() if flags.get(flag)])
            missing = [f"flash_attn_interface was built without {lacks}"]
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        missing.append(f"flash_attn cannot be imported ({error})")
        raise ValueError(
            f"attention backend 'flash_attn' has no package to call: {'; '.join(missing)}; "
            f"{INSTALL}, or use 'triton'"
        ) from error
    if capability[0] < 8:
        raise ValueError(
            f"compute capability is {capability[0]}.{capability[1]}: attention backend "
            "'flash_attn' needs 8.0 or more; use 'triton'"
        )
    if shape.block_size % FLASH2_BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size is {shape.block_size}: FlashAttention-2 needs a multiple of "
            f"{FLASH2_BLOCK_MULTIPLE} ({'; '.join(missing)}); use such a block size, or 'triton'"
        )
    return Flash2(module)

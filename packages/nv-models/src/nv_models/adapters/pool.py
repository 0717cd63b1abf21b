"""AdapterPool: the adapters of one rank that its model can use at once, each in a slot.

Owns one tensor, a row of which is a slot: all matrices of one adapter, so that a load is a single
copy. The model's layers hold views of it. Never decides which adapter is in which slot.
"""

import math
from dataclasses import dataclass

import nv_kernels as nk
import torch
from torch import nn

from nv_models.adapters.files import AdapterFiles, AdapterReader, LowRank
from nv_models.adapters.targets import AdapterTargets
from nv_models.causal import CausalLM
from nv_models.layers.embedding import Embedding, Head
from nv_models.layers.experts import ExpertMLPs, Router
from nv_models.layers.linear import Linear
from nv_models.quantization.form import Region

LEAST_RANK = 16
"""Columns of B are padded to so many: a dot on the tensor cores takes no fewer."""
OPERAND = 16
"""Values to which each matrix is aligned, so that kernels read 16 bytes at once."""
WHY_NOT_EXPERTS = (
    "adapters of a mixture's experts or router are not computed: merge it (`merge_and_unload`)"
)
WHY_NOT_SCORE = (
    "a classifier's own head is not taken from an adapter: merge it (`merge_and_unload`)"
)
WHY_NOT_SCALED = (
    "this architecture multiplies its embedding, whose adapter is not computed: train it without"
)


@dataclass(frozen=True)
class _Place:
    """One of a product's parts in a slot.

    Attributes:
        region: of the checkpoint's matrix that this rank holds; of an embedding its rows are the
            vocabulary's.
        order: which of the region's rows is the i-th here; None: they are in order.
        a: first value of its A, and its rows' length.
        b: likewise of B.
        is_embedding: A is kept with a row for each token.
    """

    region: Region
    order: torch.Tensor | None
    a: int
    b: int
    is_embedding: bool = False


def adapter_rank(max_rank: int) -> int:
    """R: the columns of a slot's B, for adapters up to a rank."""
    return max(LEAST_RANK, 1 << (max_rank - 1).bit_length())


class AdapterPool:
    """Slots 0 .. num_slots - 1.

    Attributes:
        targets: the modules that may have an adapter.
        num_slots: S.
        max_rank: of an adapter.
        values: [S, values of a slot].
    """

    def __init__(
        self, model: CausalLM, num_slots: int, max_rank: int, dtype: torch.dtype | None = None
    ) -> None:
        """Make an empty pool and give the model's layers their views of it.

        Args:
            model: on its device, or on meta.
            num_slots: S.
            max_rank: of an adapter.
            dtype: of the values; None: the model's.
        """
        self.num_slots, self.max_rank = num_slots, max_rank
        self._rank, self._size = adapter_rank(max_rank), 0
        self._places: dict[str, list[_Place]] = {}
        linear: dict[str, tuple[int, int]] = {}
        embedding: dict[str, tuple[int, int]] = {}
        refused = {"score": WHY_NOT_SCORE, "classifier": WHY_NOT_SCORE}
        views: list[tuple[nn.Module, str, tuple[int, ...], int, int]] = []
        device = None
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, Router | ExpertMLPs):
                refused[f"{name.rpartition('.')[0]}."] = WHY_NOT_EXPERTS
            elif isinstance(module, Linear):
                device = module.placement.device
                regions = module.regions(name)
                linear |= {region.module: region.shape for region in regions}
                parts = list(zip(regions, module.orders(), strict=True))
                views.append((module, "lora", *self._take(parts)))
            elif isinstance(module, Embedding) and name != "lm_head":
                if module.factor != 1:
                    refused[name] = WHY_NOT_SCALED
                    continue
                embedding[name] = module.vocab_size, module.hidden_size
                views.append((module, "embedding_lora", *self._take_embedding(name, module)))
            elif isinstance(module, Head):
                shape = module.vocab_size, module.hidden_size
                linear[name] = shape
                region = Region(name, shape, module.kept, range(module.hidden_size))
                rows = module.parallel.vocabulary_rows(module.vocab_size)
                views.append((module, "head_lora", *self._take([(region, None)], rows)))
        self.targets = AdapterTargets(linear, embedding, refused)
        self.dtype = dtype or model.config.dtype
        assert device is not None, "a model has products"
        self.values = torch.zeros(num_slots, self._size, dtype=self.dtype, device=device)
        for module, attribute, part_rows, a, b in views:
            setattr(module, attribute, self._view(module, attribute, part_rows, a, b))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.values.numel() * self.values.element_size()

    def image(self) -> torch.Tensor:
        """Room on the host for one slot's values: pinned memory if the pool is on a card."""
        is_pinned = self.values.device.type == "cuda"
        return torch.zeros(self._size, dtype=self.dtype, device="cpu", pin_memory=is_pinned)

    def fill(self, image: torch.Tensor, files: AdapterFiles) -> bool:
        """Read this rank's slices of an adapter into an image of a slot, and check its values.

        Returns:
            Whether the adapter changes the embedding or the head.

        Raises:
            ValueError: as `AdapterFiles.matrices`, or a value is not finite, or the files have
                changed since they were opened.
        """
        matrices, reader = files.matrices(self.targets, self.max_rank), files.read()
        image.zero_()
        for matrix in matrices:
            for place in self._places[matrix.module]:
                self._fill(image, reader, matrix, place)
        if not files.is_unchanged():
            raise ValueError(
                f"{files.folder} has changed while it was read: load it with load_inplace=True"
            )
        if not bool(image.isfinite().all()):
            raise ValueError(
                f"{files.folder} holds NaN or infinity, or values too large for {self.dtype}: train"
                " it again, or load the model with a wider lora_dtype"
            )
        ends = self.end_modules
        return any(matrix.module in ends for matrix in matrices)

    @property
    def end_modules(self) -> frozenset[str]:
        """The embedding's and the head's names."""
        return frozenset((*self.targets.embedding, "lm_head"))

    def load(self, slot: int, image: torch.Tensor) -> None:
        """Copy a slot's values to the device, in the order of its stream."""
        self.values[slot].copy_(image, non_blocking=True)

    def _take(
        self, parts: list[tuple[Region, torch.Tensor | None]], num_rows: int | None = None
    ) -> tuple[tuple[int, ...], int, int]:
        """Room for a product's parts: rows of each part, and where its A and B begin."""
        rank, columns = self._rank, len(parts[0][0].columns)
        part_rows = tuple(num_rows or len(region.rows) for region, _ in parts)
        a, b = self._room(len(parts) * rank * columns), self._room(sum(part_rows) * rank)
        first = 0
        for part, (region, order) in enumerate(parts):
            at_a, at_b = a + part * rank * columns, b + first * rank
            place = _Place(region, order, at_a, at_b)
            self._places.setdefault(region.module, []).append(place)
            first += part_rows[part]
        return part_rows, a, b

    def _take_embedding(self, name: str, module: Embedding) -> tuple[tuple[int, ...], int, int]:
        """Room for an embedding's matrices: a row of A for each token of this rank."""
        size = module.hidden_size
        region = Region(name, (module.vocab_size, size), module.kept, range(size))
        a, b = self._room(len(module.kept) * self._rank), self._room(size * self._rank)
        self._places[name] = [_Place(region, None, a, b, is_embedding=True)]
        return (size,), a, b

    def _room(self, num_values: int) -> int:
        start = self._size
        self._size += math.ceil(num_values / OPERAND) * OPERAND
        return start

    def _view(
        self, module: nn.Module, attribute: str, part_rows: tuple[int, ...], a: int, b: int
    ) -> nk.LoraWeights:
        """One product's matrices in every slot."""
        slots, rank, rows = self.num_slots, self._rank, sum(part_rows)
        b_values = self.values[:, b : b + rows * rank].view(slots, rows, rank)
        if attribute == "embedding_lora":
            assert isinstance(module, Embedding)
            count = len(module.kept)
            a_values = self.values[:, a : a + count * rank].view(slots, count, rank)
            return nk.LoraWeights(a_values, b_values, part_rows)
        assert isinstance(module, Linear | Head)
        columns = module.shape[1] if isinstance(module, Linear) else module.hidden_size
        height = len(part_rows) * rank
        a_values = self.values[:, a : a + height * columns].view(slots, height, columns)
        return nk.LoraWeights(a_values, b_values, part_rows)

    def _fill(
        self, image: torch.Tensor, reader: AdapterReader, matrix: LowRank, place: _Place
    ) -> None:
        """Read one part of a module."""
        rank, region, every = self._rank, place.region, slice(None)
        if place.is_embedding:
            rows, size = region.rows, len(region.columns)
            a = reader.slice(matrix.a, every, slice(rows.start, rows.stop)).t()  # [V, r]
            b = reader.slice(matrix.b, every, every)  # [E, r]
            height, width = a.shape
            image[place.a : place.a + height * rank].view(height, rank)[:, :width] = a
            image[place.b : place.b + size * rank].view(size, rank)[:, :width] = b * matrix.scale
            return
        rows, columns = region.rows, region.columns
        a = reader.slice(matrix.a, every, slice(columns.start, columns.stop))  # [r, K]
        b = reader.slice(matrix.b, slice(rows.start, rows.stop), every)  # [N, r]
        if place.order is not None:
            b = b[place.order]
        width, height = a.shape[0], len(rows)
        image[place.a : place.a + width * len(columns)].view(width, -1).copy_(a)
        view = image[place.b : place.b + height * rank].view(height, rank)
        view[:, :width] = b * matrix.scale

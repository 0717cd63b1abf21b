"""AdapterPool: the adapters of one rank that its model can use at once, each in a slot.

Owns one tensor, a row of which is a slot: all matrices of one adapter, so that a load is a single
copy. The model's layers hold views of it. Never decides which adapter is in which slot.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import nv_kernels as nk
import torch
from torch import nn

from nv_models.adapters.files import CHANGED, AdapterFiles, AdapterReader, LowRank, Saved
from nv_models.adapters.targets import AdapterTargets
from nv_models.causal import CausalLM
from nv_models.layers.embedding import Embedding, Head
from nv_models.layers.experts import ExpertMLPs, Router
from nv_models.layers.linear import Linear
from nv_models.pooling.pooler import Score
from nv_models.quantization.form import Region

LEAST_RANK = 16
"""Columns of B are padded to so many: a dot on the tensor cores takes no fewer."""
OPERAND = 16
"""Values to which each matrix is aligned, so that kernels read 16 bytes at once."""
WHY_NOT_EXPERTS = (
    "adapters of a mixture's experts or router are not computed: merge it (`merge_and_unload`)"
)
WHY_NOT_SCORE = (
    "this model has no such classifier: load it as one, or merge the adapter (`merge_and_unload`)"
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


class AdapterImage(NamedTuple):
    """The values of one slot on the host.

    Attributes:
        values: of low rank, in the pool's dtype.
        score: what it adds to a classifier's weight, and in the last column to its bias: [labels,
            E + 1] fp32; of other models [0, 1].
    """

    values: torch.Tensor
    score: torch.Tensor


class AdapterPool:
    """Slots 0 .. num_slots - 1.

    Attributes:
        targets: the modules that may have an adapter.
        num_slots: S.
        max_rank: of an adapter.
        values: [S, values of a slot].
        score: [S, labels, E + 1] fp32, as `AdapterImage.score`.
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
        score: Score | None = None
        views: list[tuple[nn.Module, str, tuple[int, ...], int, int]] = []
        device = None
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, Router | ExpertMLPs):
                refused[f"{name.rpartition('.')[0]}."] = WHY_NOT_EXPERTS
            elif isinstance(module, Score) and not module.config.label_tokens:
                score = module
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
        saved: dict[str, tuple[int, int]] = {}
        if score is not None:
            saved["score"] = score.weight.shape[0], score.weight.shape[1]
        self.targets = AdapterTargets(linear | saved, embedding, saved, refused)
        self._score = score
        self.dtype = dtype or model.config.dtype
        assert device is not None, "a model has products"
        self.values = torch.zeros(num_slots, self._size, dtype=self.dtype, device=device)
        height, width = saved.get("score", (0, 0))
        self.score = torch.zeros(num_slots, height, width + 1, device=device)
        if score is not None:
            score.adapters = self.score
        for module, attribute, part_rows, a, b in views:
            setattr(module, attribute, self._view(module, attribute, part_rows, a, b))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.values.numel() * self.values.element_size() + 4 * self.score.numel()

    def image(self) -> AdapterImage:
        """Room on the host for one slot's values: pinned memory if the pool is on a card."""
        made = partial(torch.zeros, device="cpu", pin_memory=self.values.device.type == "cuda")
        return AdapterImage(
            made(self._size, dtype=self.dtype), made(self.score.shape[1:], dtype=torch.float32)
        )

    def fill(self, image: AdapterImage, files: AdapterFiles) -> bool:
        """Read this rank's slices of an adapter into an image of a slot, and check its values.

        Returns:
            Whether the adapter changes the embedding, the head or a classifier's own.

        Raises:
            ValueError: as `AdapterFiles.matrices`, or a value is not finite, or the files have
                changed since they were opened.
        """
        matrices = files.matrices(self.targets, self.max_rank)
        for part in image:
            part.zero_()
        with files.read() as reader:
            for matrix in matrices:
                if matrix.module == "score":
                    product = reader.whole(matrix.b) @ reader.whole(matrix.a) * matrix.scale
                    image.score[:, :-1] += product
                    continue
                for place in self._places[matrix.module]:
                    self._fill(image.values, reader, matrix, place)
            for module in files.saved():
                self._replace(image.score, reader, module)
        if not files.is_unchanged():
            raise ValueError(f"{files.folder} {CHANGED}")
        if not all(bool(part.isfinite().all()) for part in image):
            raise ValueError(
                f"{files.folder} holds NaN or infinity, or values too large for {self.dtype}: train"
                " it again, or load the model with a wider lora_dtype"
            )
        ends = self.end_modules
        return bool(files.saved()) or any(matrix.module in ends for matrix in matrices)

    def _replace(self, score: torch.Tensor, reader: AdapterReader, module: Saved) -> None:
        """Note by how much a classifier's head differs from the base's."""
        assert self._score is not None, "compared with the model"
        base = self._score
        score[:, :-1] += reader.whole(module.weight) - base.weight.detach().cpu()
        if module.bias is not None and base.bias is not None:
            score[:, -1] += reader.whole(module.bias) - base.bias.detach().cpu()

    @property
    def end_modules(self) -> frozenset[str]:
        """The names of the embedding, the head and a classifier's own."""
        return frozenset((*self.targets.embedding, "lm_head", "score"))

    def load(self, slot: int, image: AdapterImage) -> None:
        """Copy a slot's values to the device, in the order of its stream."""
        self.values[slot].copy_(image.values, non_blocking=True)
        if self.score.numel():
            self.score[slot].copy_(image.score, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros, which change nothing."""
        self.values[slot].zero_()
        self.score[slot].zero_()

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

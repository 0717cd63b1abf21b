"""The interface of every model. Owns the type that the engine calls. Never computes a layer."""

from abc import ABC, abstractmethod

import nv_kernels as nk
import torch

from nv_models.config import ModelConfig
from nv_models.context import ForwardContext
from nv_models.layers.embedding import Head
from nv_models.layers.kv_scales import KVScales
from nv_models.layers.layer import Layer
from nv_models.parts import Parts
from nv_models.pooling.pooler import Pooler


class CausalLM(Layer, ABC):
    """A decoder: token ids to hidden states, and hidden states to logits.

    Module names are the checkpoint's, so that the loader needs no table of them. There is no
    Python work that depends on values, so that a step can be captured in a CUDA graph.
    """

    config: ModelConfig
    lm_head: Head | None
    """None if it pools: `config.has_head` is False."""
    pooler: Pooler
    """Of a model that pools; set by the loader."""

    def kv_scales(self) -> list[tuple[float, float]]:
        """The scales of keys and of values in each layer's fp8 KV cache; 1 unless loaded."""
        found = [(each.k, each.v) for each in self.modules() if isinstance(each, KVScales)]
        return found or [(1.0, 1.0)] * self.config.num_layers

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Token ids [T] -> hidden states [T, E] after the last norm; fills the KV caches."""

    def in_parts(self, token_ids: torch.Tensor, context: ForwardContext) -> Parts[torch.Tensor]:
        """As `forward`, in parts of a layer each; one part where an architecture has no others."""
        yield from ()
        return self.forward(token_ids, context)

    @abstractmethod
    def logits(self, hidden: torch.Tensor, lora: nk.LoraPlan | None = None) -> torch.Tensor:
        """Hidden states [R, E] -> logits [R, V] fp32, the full vocabulary on every rank.

        Args:
            hidden: of the rows.
            lora: the adapters of the rows; None: none changes the head.
        """

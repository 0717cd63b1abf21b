"""The base of a model's modules: where its attributes are, and what a step reads."""

import pytest
import torch
from nv_models.layers.layer import Layer
from torch import nn


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape), requires_grad=False)


class Doubled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(3)

    def forward(self, x: torch.Tensor, *, factor: int = 2) -> torch.Tensor:
        return x * factor + self.weight


class Twice(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x), factor=3)


def test_a_call_runs_forward_without_the_search_of_torch(monkeypatch):
    model = Twice()

    def searched(module, name):
        raise AssertionError(f"{name} was searched")

    monkeypatch.setattr(nn.Module, "__getattr__", searched)
    assert model(torch.ones(3)).tolist() == [6, 6, 6]
    assert [name for name, _ in model.named_parameters()] == ["inner.weight"]


def test_a_parameter_that_is_replaced_is_read_anew():
    layer = Doubled()
    layer.weight = nn.Parameter(torch.ones(3), requires_grad=False)
    assert layer(torch.zeros(3)).tolist() == [1, 1, 1]
    assert dict(layer.named_parameters())["weight"] is layer.weight
    layer.weight = None
    assert layer.weight is None
    assert not dict(layer.named_parameters())


def test_a_parameter_that_is_deleted_is_gone():
    layer = Twice()
    del layer.inner.weight, layer.inner
    assert not list(layer.named_modules())[1:]
    with pytest.raises(AttributeError, match="inner"):
        _ = layer.inner
    with pytest.raises(AttributeError):
        del layer.inner

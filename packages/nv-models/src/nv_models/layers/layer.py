"""The base of every module of a model.

Owns what a call of a module costs. In a step of one token on a CPU, torch's own call and its search
for parameters take as long as all other Python work of a layer.
"""

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module without hooks, whose parameters and modules are plain attributes too.

    `nn.Module` keeps them in dicts of its own, which Python reads only after a failed search.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run `forward`; hooks, if there were any, would not run."""
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Set an attribute: a parameter or a module also where Python looks first."""
        super().__setattr__(name, value)
        if name in self._parameters or name in self._modules:
            vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        """Delete an attribute from both places."""
        super().__delattr__(name)
        vars(self).pop(name, None)

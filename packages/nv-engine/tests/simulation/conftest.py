"""Makes the fake device importable here, and gives the tests their engine over it."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def simulation():
    """The class: a fixture, as test folders cannot import each other's modules."""
    from simulated_engine import Simulation  # noqa: PLC0415  importable from here on

    return Simulation


@pytest.fixture(scope="session")
def column_simulation():
    """The class of the same over columns."""
    from simulated_engine import ColumnSimulation  # noqa: PLC0415  importable from here on

    return ColumnSimulation


@pytest.fixture(params=[0, 1, 3])
def depth(request):
    return request.param

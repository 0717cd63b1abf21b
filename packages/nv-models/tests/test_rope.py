"""The refusals of RopeConfig; its results are compared in test_config.py."""

import pytest
from nv_models import RopeConfig


@pytest.mark.parametrize("theta", [1, 0.5])
def test_yarn_divides_by_the_logarithm_of_theta(theta):
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(
        ValueError, match=f"rope_theta is {theta}: it must be more than 1 with yarn"
    ):
        RopeConfig.from_parameters({**parameters, "rope_theta": theta})
    assert RopeConfig.from_parameters({**parameters, "rope_theta": 1e4}).rope_theta == 1e4


def test_theta_is_positive():
    with pytest.raises(ValueError, match="rope_theta is 0: it must be a positive number"):
        RopeConfig.from_parameters({"rope_type": "default", "rope_theta": 0})


@pytest.mark.parametrize("name", ["beta_fast", "beta_slow"])
def test_yarn_takes_the_logarithm_of_its_betas(name):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, name: -1}
    with pytest.raises(ValueError, match=f"{name} is -1.*: it must be a positive number"):
        RopeConfig.from_parameters(parameters)

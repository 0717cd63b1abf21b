"""What RopeConfig refuses; what it computes is compared in test_config.py."""

import pytest
from nv_models import RopeConfig


@pytest.mark.parametrize("theta", [1, 0.5])
def test_yarn_divides_by_the_logarithm_of_theta(theta):
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match=f"rope_theta must be more than 1 with yarn, got {theta}"):
        RopeConfig.from_parameters({**parameters, "rope_theta": theta})
    assert RopeConfig.from_parameters({**parameters, "rope_theta": 1e4}).rope_theta == 1e4


def test_theta_is_positive():
    with pytest.raises(ValueError, match="rope_theta must be a positive number, got 0"):
        RopeConfig.from_parameters({"rope_type": "default", "rope_theta": 0})


@pytest.mark.parametrize("name", ["beta_fast", "beta_slow"])
def test_yarn_takes_the_logarithm_of_its_betas(name):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, name: -1}
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got -1"):
        RopeConfig.from_parameters(parameters)

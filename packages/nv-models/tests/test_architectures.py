"""The table of architectures."""

import subprocess
import sys

import pytest
from nv_models import CausalLM
from nv_models.architectures import ARCHITECTURES, model_class, supported_architecture


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_leads_to_a_model(architecture):
    assert issubclass(model_class(architecture), CausalLM)


def test_first_supported_one_is_taken():
    assert supported_architecture(["Unknown", "LlamaForCausalLM"]) == "LlamaForCausalLM"


def test_unsupported_names_the_supported():
    with pytest.raises(ValueError, match="GPT is not supported; supported are Qwen3ForCausalLM, "):
        model_class("GPT")


def test_importing_the_package_imports_no_model_and_no_transformers():
    code = (
        "import sys, nv_models; "
        "print([name for name in ('nv_models.decoder', 'transformers', 'gguf') "
        "if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

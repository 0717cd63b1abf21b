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


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("DeepseekV3ForCausalLM", r"its attention is latent \(MLA\)"),
        ("Qwen3NextForCausalLM", "it has layers of linear attention"),
        ("MambaForCausalLM", "of a state space"),
        ("Gemma3nForConditionalGeneration", "per-layer inputs"),
        ("Gemma3ForConditionalGeneration", "it reads images, sound"),
        ("BertForSequenceClassification", "its attention is bidirectional"),
    ],
)
def test_a_family_that_is_refused_names_the_reason(architecture, why):
    message = rf"{architecture} is not supported, as .*{why}.*; supported are Qwen3ForC"
    with pytest.raises(ValueError, match=message):
        supported_architecture([architecture])


def test_importing_the_package_imports_no_model_and_no_transformers():
    code = (
        "import sys, nv_models; "
        "print([name for name in ('nv_models.decoder', 'transformers', 'gguf') "
        "if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

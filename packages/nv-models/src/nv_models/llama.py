"""Llama (Touvron et al. 2023, arXiv 2302.13971), versions 1 to 3.x, and what shares its class."""

from nv_models.decoder import Decoder


class Llama(Decoder):
    """LlamaForCausalLM: queries and keys are rotated as they are projected."""

    qk_norm = False

"""Qwen3, dense (Qwen team 2025, arXiv 2505.09388)."""

from nv_models.decoder import Decoder


class Qwen3(Decoder):
    """Qwen3ForCausalLM: every query and key head goes through an RMS norm before its rotation."""

    qk_norm = True

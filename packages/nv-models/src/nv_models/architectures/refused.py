"""Families of models that are refused, with the reason.

Owns the reasons. Never decides what is supported: the table of architectures does.
"""

import re

LATENT = "its attention is latent (MLA), whose cache is not keys and values of heads"
LINEAR = "it has layers of linear attention or of a state space, whose state is not a cache of keys"
PER_LAYER = "each of its layers reads an embedding of its own (per-layer inputs)"
BIDIRECTIONAL = "its attention is bidirectional, and all backends are causal"
ENCODER = "it reads images, sound or the output of an encoder; only decoders of text run"
REASONS = {
    r"Deepseek(V2|V3|V32)|MiniCPM3|Glm4MoeLite|Kimi|LongcatFlash": LATENT,
    r"Qwen3Next|Qwen3_5|.*Mamba|Jamba|Bamba|Zamba|NemotronH|FalconH1|.*Rwkv|RWKV|Lfm2|MiniMax"
    r"|RecurrentGemma|GraniteMoeHybrid": LINEAR,
    r"Gemma3n|Gemma4": PER_LAYER,
    r".*Bert|Roberta|XLMRoberta|.*ForMaskedLM": BIDIRECTIONAL,
    r".*ForConditionalGeneration|.*ForVision|Whisper|.*ForSpeechSeq2Seq": ENCODER,
}
"""By a pattern that begins an architecture's name."""


def reason(architecture: str) -> str | None:
    """The reason why a family is refused; None of one that is only not built."""
    found = (why for pattern, why in REASONS.items() if re.match(pattern, architecture))
    return next(found, None)

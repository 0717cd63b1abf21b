"""Names of transformers' classes: what stands after the family's name.

Owns the endings. Never knows which families are supported: `architectures` does.
"""

CAUSAL = "ForCausalLM"
BODY = "Model"
OF_PROMPTS = "ForSequenceClassification"
OF_TOKENS = "ForTokenClassification"


def causal_name(name: str) -> str:
    """The class of the same family that has a head for tokens, as Qwen3ForCausalLM."""
    for ending in (OF_PROMPTS, OF_TOKENS, BODY):
        if name.endswith(ending):
            return name.removesuffix(ending) + CAUSAL
    return name


def is_body(name: str) -> bool:
    """Whether a class has no head at all, as Qwen3Model."""
    return name.endswith(BODY)


def is_classifier(name: str) -> bool:
    """Whether a class gives class values, of prompts or of tokens."""
    return name.endswith((OF_PROMPTS, OF_TOKENS))

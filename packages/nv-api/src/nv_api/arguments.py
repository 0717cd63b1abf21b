"""Arguments: vLLM's arguments that the methods of `LLM` do not have.

Owns the table; `nv_engine.names` raises and warns by it.
"""

from nv_engine.names import ForeignNames

VLLM_NAMES = ForeignNames(
    unbuilt={
        "documents": ([],),
        "enable_thinking": (),
        "guided_options_request": (),
        "inputs": (),
        "mm_processor_kwargs": ({},),
        "priority": (0,),
        "prompt_adapter_request": (),
        "prompt_token_ids": (),
        "structured_outputs": (),
        "tokenization_kwargs": ({},),
        "truncate_prompt_tokens": (),
    },
    instead={
        "documents": "pass chat_template_kwargs={'documents': …}",
        "enable_thinking": "pass chat_template_kwargs={'enable_thinking': …}",
        "guided_options_request": "pass SamplingParams(structured_outputs=…)",
        "inputs": "pass them as prompts",
        "mm_processor_kwargs": "prompts are text or token ids",
        "priority": "requests start in their order; of one list, those with the largest "
        "max_tokens start first",
        "prompt_adapter_request": "put the adapter's text in front of the prompt",
        "prompt_token_ids": "pass the ids as prompts: a list of ids, or a list of such lists",
        "structured_outputs": "pass SamplingParams(structured_outputs=…)",
        "tokenization_kwargs": "call llm.tokenizer yourself, and pass its ids as prompts",
        "truncate_prompt_tokens": "cut the prompt's token ids yourself, as ids[-k:]",
    },
)

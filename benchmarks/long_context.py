"""Decoding over long contexts: 32 sequences of 8,192 tokens, milliseconds per step.

The first 32 tokens do not count, because their steps still contain prompts.
"""

from latency import main

if __name__ == "__main__":
    main("long_context", batch=32, prompt_len=8192, output_len=96, shared_len=32)

"""Decoding over long contexts: 32 sequences of 8,192 tokens, milliseconds a step of all of them.

The first 32 tokens do not count: while prompts still come in, steps are of another kind.
"""

from latency import main

if __name__ == "__main__":
    main("long_context", batch=32, prompt_len=8192, output_len=96, shared_len=32)

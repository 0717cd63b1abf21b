"""Decoding over long contexts: 32 sequences of 8,192 tokens, milliseconds a step."""

from latency import main

if __name__ == "__main__":
    main("long_context", batch=32, prompt_len=8192, output_len=64)

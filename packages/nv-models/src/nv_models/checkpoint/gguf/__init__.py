"""GGUF files: the header, the tensors, and a folder with the config and tokenizer they carry.

Needs the extra `nv-models[gguf]`, so nothing outside imports it before a GGUF file is met.
"""

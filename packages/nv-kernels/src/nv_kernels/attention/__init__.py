"""Attention over paged keys and values: one protocol, several backends."""

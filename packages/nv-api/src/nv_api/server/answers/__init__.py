"""Answers: from deltas to the bytes of a response, streamed or whole.

Owns the forms of responses. Never talks to the engine or to a client.
"""

"""Jobs: a request of one dialect, in the words of the engine.

Owns the translation in both directions. Never sends anything.
"""

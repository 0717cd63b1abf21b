"""Norms and the gate: what is done to a token's row without a weight matrix."""

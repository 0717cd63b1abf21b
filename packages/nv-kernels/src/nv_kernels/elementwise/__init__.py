"""Norms and the gate: ops on a token's row that need no matrix product."""

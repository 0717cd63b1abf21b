"""Routes: one file for each kind.

Owns paths and what /openapi.json says of them.
"""

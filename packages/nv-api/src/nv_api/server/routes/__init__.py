"""Routes: one file for each kind.

Owns paths and their descriptions in /openapi.json.
"""

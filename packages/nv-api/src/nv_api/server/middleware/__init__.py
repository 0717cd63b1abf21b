"""Middleware, each a plain ASGI callable: request ids, counting, keys, clients that leave.

Owns what every route has in common. Never reads a body.
"""

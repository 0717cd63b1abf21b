"""`nv run-batch`: the requests of a file through the app of `nv serve`, without a socket.

Owns the two files, and how many requests are in flight. Never answers a request itself.
"""

"""The page at `/`: one hand-written file, `index.html`, and the policy that it is served with.

Owns what a browser shows. Never fetches anything from another server.
"""

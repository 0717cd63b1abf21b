"""The engine in a process of its own, and its front end's side of the connection.

Token ids travel, never text, and never a pickle.
"""

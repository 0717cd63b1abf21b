"""Bench: the load of many clients on a server, and what they measure.

It speaks OpenAI's API, so any server with these routes can be measured.
"""

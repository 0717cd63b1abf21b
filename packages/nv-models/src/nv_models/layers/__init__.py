"""The layers that models share. Each takes its placement as an argument and lists its shards."""

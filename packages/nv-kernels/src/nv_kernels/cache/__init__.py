"""The paged KV cache of a layer: its layout, and the ops that write to it."""

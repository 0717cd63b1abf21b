"""Products by a weight: their definitions, the tuned cuts, and the chain of a layer's products."""

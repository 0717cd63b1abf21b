"""Weights that stay quantized: their records, with a definition of each product in plain torch."""

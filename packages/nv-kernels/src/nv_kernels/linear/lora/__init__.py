"""Adapters of low rank beside a weight: the sort of tokens, the two products, and the sum."""

"""A mixture of experts: the choice of experts for each token, and the products by their weights."""

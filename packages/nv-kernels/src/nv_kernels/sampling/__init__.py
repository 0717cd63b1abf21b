"""From logits to token ids: controls, the draw, log-probabilities."""

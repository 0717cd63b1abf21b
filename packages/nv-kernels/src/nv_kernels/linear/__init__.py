"""Products by a weight: definitions, tuned launch settings, and the ops of a layer."""

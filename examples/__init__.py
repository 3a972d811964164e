"""Applications to learn from, run from the repository's root."""

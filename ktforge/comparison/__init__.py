"""Two checkpoints against each other: whether both are whole, and how far apart their weights are."""

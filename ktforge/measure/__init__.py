"""How far converted weights are from the original, and what codes and scales look like."""

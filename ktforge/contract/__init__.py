"""What everybody agrees on: what travels, the five stages, hooks, a plan as data, and whose fault it is."""

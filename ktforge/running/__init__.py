"""A plan carried out: workers, memory in flight, each unit through the stages."""

"""A checkpoint looked at: what it is, what could be made of it and why not, and a pipeline file to begin with."""

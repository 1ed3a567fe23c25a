"""Pipelines: planned and run, read from a file, and those that commands stand for."""

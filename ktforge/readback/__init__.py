"""Packed folders: whose they are, and their weights presented as BF16."""

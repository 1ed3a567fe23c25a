"""A Hugging Face folder: its files, its shards and their index."""

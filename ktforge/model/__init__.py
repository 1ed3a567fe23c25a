"""What config.json and tensor names mean: experts, layers, families, multi-token prediction."""

"""An output folder: opened, gone on with, filled, published."""

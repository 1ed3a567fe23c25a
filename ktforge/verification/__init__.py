"""An output looked at by itself: whether it is whole, what was written, and nothing that an engine gets wrong."""

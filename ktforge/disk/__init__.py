"""Strangers' files read with care, every change to a disk, and the names and journal of an output that grows."""

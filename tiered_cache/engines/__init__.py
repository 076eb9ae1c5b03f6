"""Engines: whatever computes sequences and owns their state on a device."""

"""Admission and eviction: what a tier takes and what it drops. Policies propose; they do no I/O and read no clock."""

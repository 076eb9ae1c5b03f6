"""Replay of request traces: readers, driver, report."""

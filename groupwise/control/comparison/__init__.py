"""Comparing runs: algorithms on environments over seeds, as CSV, Markdown and plots."""

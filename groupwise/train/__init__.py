"""Training language models: the loop, and what changes while it runs."""

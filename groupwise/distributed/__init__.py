"""Runs of several processes: what they exchange, how work is divided among them, and how they are started."""

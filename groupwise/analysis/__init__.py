"""Runs after the fact, and while they train: reading their folders, findings, and replays."""

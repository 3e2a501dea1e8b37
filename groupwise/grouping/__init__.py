"""Answers that are alike: their texts as vectors, clusters of them within each prompt, and what that says of a run."""

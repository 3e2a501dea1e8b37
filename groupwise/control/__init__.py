"""GRPO against PPO on Gymnasium control: a question is a first state, an answer is an episode.

Three files, to be read in this order: `utils` (network, environments, buffers, live plot), `algorithms` (settings and
the two agents) and `main` (the training loops, what a run saves, comparing, playing).
"""

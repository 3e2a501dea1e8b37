"""GRPO against PPO on Gymnasium environments, where the prompt is a first state and the completion an episode.

Read `utils` (network, environment, buffers, live plot) first, then `algorithms` (the two agents) and `main` (training
loops and checkpoints). `policies` has the distributions of discrete and continuous actions; `comparison` trains and
compares several algorithms over several seeds.
"""

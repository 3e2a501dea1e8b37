"""GRPO against PPO on Gymnasium environments, where the prompt is a first state and the completion an episode.

Read `utils` (network, environments, buffers, live plot) first, then `algorithms` (settings and the two agents) and
`main` (training loops, checkpoints, playing). `comparison` trains and compares several algorithms over several seeds.
"""

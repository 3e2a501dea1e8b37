"""A cost model of a step on many GPUs: memory, time, bytes on each link. Plain arithmetic, no torch.

`shapes` and `gpus` hold the numbers of models and devices, `work` what a step computes, `cost` its time, `memory` its
bytes, `layouts` the ways to place it on several GPUs, and `plan` compares them. `constants` were fitted to measurements
on one GPU (tools/fit_plan.py); everything beyond one GPU is a prediction.
"""

"""Sampling by transformers in a Ray actor, in place of vLLM; it gets the trained weights before every step."""

from __future__ import annotations

from collections import Counter

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "cpu_server"


class CpuServer:
    def __init__(self, path, length):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.length = length
        self.steps = 0
        self.asked = Counter()

    async def load(self, weights, steps):
        self.model.load_state_dict(weights, strict=False)  # a tied head is not sent
        self.steps = steps

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        ids = torch.tensor([list(prompt_ids)])
        asked = (self.steps, *prompt_ids)
        self.asked[asked] += 1
        torch.manual_seed(hash((*asked, self.asked[asked])))  # independent of the order of sessions
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=self.length,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answer = out.sequences[0, ids.shape[1] :].tolist()
        logps = [float(scores[0].log_softmax(-1)[token]) for scores, token in zip(out.scores, answer, strict=True)]
        facts = {"global_steps": self.steps}
        return TokenOutput(token_ids=answer, log_probs=logps, stop_reason="completed", extra_fields=facts)

    async def sleep(self, **_): ...


class CpuReplica(RolloutReplica):
    async def launch_servers(self):
        server = ray.remote(CpuServer).options(name=NAME, num_cpus=0)
        self._server_address = NAME
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self.servers = [self._server_handle]


class CpuRollout(BaseRollout):
    async def resume(self, tags): ...

    async def release(self): ...

    async def update_weights(self, weights, global_steps=None, **_):
        full = {name: getattr(weight, "full_tensor", lambda it=weight: it)() for name, weight in weights}
        state = {name: weight.detach().float().cpu() for name, weight in full.items()}
        await ray.get_actor(NAME).load.remote(state, global_steps)

"""The trainer with verl's TransferQueue on Ray, configuration, constructor and advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from groupwise.config import GroupingSection
from groupwise.core import group_advantages
from groupwise.errors import ConfigError
from groupwise.grouping.embed import load_embedder
from groupwise.grouping.grouper import LocalGrouper, group_texts
from groupwise.integrations.verl import ESTIMATOR
from groupwise.integrations.verl.placement import BundleGrouper, gpu_bundles, verl_grouper
from groupwise.integrations.verl.trainer import ClassicGrouping, SimilarityGrouping, V1Grouping
from groupwise.model.tiny import tiny_tokenizer
from tests.verl.common import compose
from tests.weights import wordllama

N = ["actor_rollout_ref.rollout.n=4"]
SETTINGS = GroupingSection(embedder="wordllama")
ANSWERS = {  # of two prompts with unequal numbers of answers
    "u": ["a dog barks at the cat", "the dog barked at a cat", "quarterly interest rates rose", "hm</think>rates rose"],
    "v": ["one egg and some flour", "an egg with flour", "seven violins"],
}
REWARDS = {"u": [1.0, 0.0, 3.0, 5.0], "v": [0.25, 0.75, 9.0]}


@pytest.fixture
def trainer(queue):
    """A trainer with the tokenizer and the (empty) GPU pool that verl's start-up would add."""
    wordllama()
    made = get_trainer_cls("sync")(compose(*N, "data.train_batch_size=2"))
    made.tokenizer = tiny_tokenizer()
    made.resource_pool_manager = ResourcePoolManager({"global_pool": [0]}, {})
    return made


@pytest.fixture
def batch(queue):
    """Answers as verl's agent loop stores them, one of them in two outputs, padded to a multiple of 6."""
    tokenizer = tiny_tokenizer()
    rows = [(uid, number, 0, text) for uid, texts in ANSWERS.items() for number, text in enumerate(texts)]
    rows.insert(1, ("u", 0, 1, rows[0][3]))
    rows[0] = ("u", 0, 0, "let me ask a tool first")
    keys, fields, tags = [], [], []
    for uid, number, output, text in rows:
        ids = torch.tensor(tokenizer.encode(text + "<|end|>"))
        scores = torch.zeros(len(ids))
        scores[-1] = REWARDS[uid][number]
        ones, prompt = torch.ones_like(ids), torch.tensor([5, 6])
        both = torch.cat([prompt, ids])
        keys.append(f"{uid}_{number}_{output}")
        fields.append(
            {
                "uid": uid,
                "prompts": prompt,
                "responses": ids,
                "input_ids": both,
                "position_ids": torch.arange(len(both)),
                "response_mask": ones,
                "loss_mask": ones,
                "rm_scores": scores,
                "rollout_log_probs": torch.full((len(ids),), -1.0),
                "num_turns": 2,
            }
        )
        tags.append({"seq_len": len(both), "status": "success"})
    queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    meta = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    meta = upsample_batch_to_divisible_size(meta, 6, tokenizer.eos_token_id)
    lengths = [len(row["responses"]) for row in fields] + [1] * (len(meta) - len(rows))
    old = torch.nested.as_nested_tensor([torch.full((length,), -1.0) for length in lengths], layout=torch.jagged)
    fields = TensorDict({"old_log_probs": old}, batch_size=len(meta))  # verl adds them after padding
    queue.kv_batch_put(keys=meta.keys, partition_id="train", fields=fields)
    meta.reorder([5, 0, 7, 9, 2, 11, 1, 4, 8, 3, 10, 6])  # as verl does to balance its GPUs
    yield meta
    queue.kv_clear(keys=meta.keys, partition_id="train")


def expected_groups():
    """Labels, rewards and silhouettes, computed without verl."""
    embedder = load_embedder("wordllama")
    labels, rewards, scores = {}, {}, []
    for uid, texts in ANSWERS.items():
        result = group_texts(embedder, [texts], SETTINGS)
        scores.append(float(result.scores[0]))
        for number in range(len(texts)):
            labels[f"{uid}_{number}"] = f"{uid}_{result.labels[0, number, 0]}"
            rewards[f"{uid}_{number}"] = REWARDS[uid][number]
    return labels, rewards, scores


def test_labels_metrics_and_advantages_of_a_batch(trainer, batch, queue):
    metrics = {}
    keys = list(batch.keys)
    out = trainer._compute_advantage(batch, metrics)
    labels, rewards, scores = expected_groups()
    expected = group_advantages(torch.tensor(list(rewards.values())), list(labels.values()), eps=1e-6)
    advantage = dict(zip(rewards, expected.tolist(), strict=True))
    assert sum(value == 0 for value in advantage.values()) == 1  # the violins, despite the best reward
    assert sorted(out.keys) == sorted(keys)

    fields = ["uid", "similarity_group_labels", "advantages", "returns", "response_mask"]
    data = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
    stored_labels = list(data["similarity_group_labels"])
    for row, key in enumerate(keys):
        mask, advantages = data["response_mask"][row].float(), data["advantages"][row]
        if key.startswith("pad"):
            assert not advantages.any()
            continue
        assert data["uid"][row] == key[0]
        assert stored_labels[row] == labels[key[:3]]
        torch.testing.assert_close(advantages, mask * advantage[key[:3]], atol=1e-5, rtol=0)
        torch.testing.assert_close(data["returns"][row], advantages, atol=0, rtol=0)
    assert metrics["similarity_groups/avg_silhouette_score"] == pytest.approx(sum(scores) / 2)
    assert metrics["similarity_groups/n_prompts_split_into_2_groups"] == 2
    assert metrics["similarity_groups/avg_groups_per_prompt"] == 2
    assert metrics["similarity_groups/n_single_member_groups"] == 1
    assert metrics["similarity_groups/seconds"] > 0


def test_metrics_pass_verls_aggregation(trainer, batch):
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    metrics, both = {}, MetricsAggregator()
    trainer._compute_advantage(batch, metrics)
    both.add_step_metrics(metrics, sample_count=7)
    both.add_step_metrics(metrics, sample_count=7)
    aggregated = both.get_aggregated_metrics()
    assert {name: aggregated[name] for name in metrics if name.startswith("similarity_groups/")} == pytest.approx(
        {name: value for name, value in metrics.items() if name.startswith("similarity_groups/")}
    )


SEPARATE = [
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.train_batch_size=8",
]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_estimator_selects_groups_in_every_mode(mode):
    overrides = [*(SEPARATE if mode == "separate_async" else []), f"trainer.v1.trainer_mode={mode}"]
    made = get_trainer_cls(mode)(config=compose(*N, *overrides))
    plain = compose("~algorithm.similarity", "algorithm.adv_estimator=grpo", *overrides)
    reference = get_trainer_cls(mode)(config=plain)
    assert isinstance(made, V1Grouping)
    assert isinstance(made, type(reference))
    assert not isinstance(reference, SimilarityGrouping)
    assert made.trainer_mode == reference.trainer_mode == mode
    assert type(made.replay_buffer) is type(reference.replay_buffer)


def test_unknown_embedder_fails_before_models_are_loaded():
    config = compose(*N, "algorithm.similarity.embedder=minlm")
    with pytest.raises(ConfigError, match="did you mean 'minilm'"):
        get_trainer_cls("sync")(config)


def test_embedder_that_cannot_be_downloaded_fails_before_models_are_loaded():
    config = compose(*N, "algorithm.similarity.embedder=nobody/no-such")
    with pytest.raises(ConfigError, match=r"nobody/no-such .* Set algorithm\.similarity\.embedder to"):
        get_trainer_cls("sync")(config)


def test_trainers_with_a_loop_of_their_own_are_refused():
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    with pytest.raises(ConfigError, match=r"OneStepOffRayTrainer, which has a training loop of its own"):
        OneStepOffRayTrainer(compose(*N), tokenizer=None, role_worker_mapping={}, resource_pool_manager=None)


def test_classic_trainer_gets_groups():
    """Labels, advantages and metrics of a batch with mixed rows; verl's function is put back."""
    from verl.trainer.ppo import ray_trainer

    wordllama()
    rows = [("u", 0), ("v", 0), ("v", 1), ("u", 1), ("u", 2), ("v", 2), ("u", 3)]
    tokenizer = tiny_tokenizer()
    ids = [torch.tensor(tokenizer.encode(ANSWERS[uid][number] + "<|end|>")) for uid, number in rows]
    responses = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = torch.arange(responses.shape[1]) < torch.tensor([len(row) for row in ids])[:, None]
    scores = torch.zeros(responses.shape)
    scores[torch.arange(len(rows)), mask.sum(1) - 1] = torch.tensor([REWARDS[uid][number] for uid, number in rows])
    data = DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask.long(), "token_level_rewards": scores},
        non_tensors={"uid": np.array([uid for uid, _ in rows], dtype=object)},
    )

    class Loop(ray_trainer.RayPPOTrainer):
        """verl's trainer without models: its loop is the call that verl's loop makes."""

        def __init__(self, config):
            self.config, self.tokenizer = config, tokenizer
            self.resource_pool_manager = ResourcePoolManager({"global_pool": [0]}, {})

        def fit(self):
            self.result = ray_trainer.compute_advantage(data, adv_estimator=ESTIMATOR, config=self.config.algorithm)

        def _update_actor(self, batch):
            return DataProto(meta_info={"metrics": {"actor/loss": [1.0]}})

    trainer = type("Trainer", (ClassicGrouping, Loop), {})(compose(*N, "trainer.use_v1=false"))
    compute = ray_trainer.compute_advantage
    trainer.fit()
    assert ray_trainer.compute_advantage is compute
    labels, rewards, scores = expected_groups()
    names = [f"{uid}_{number}" for uid, number in rows]
    assert list(data.non_tensor_batch["similarity_group_labels"]) == [labels[name] for name in names]
    expected = group_advantages(
        torch.tensor([rewards[name] for name in names]), [labels[name] for name in names], eps=1e-6
    )
    torch.testing.assert_close(trainer.result.batch["advantages"], expected[:, None] * mask, atol=1e-5, rtol=0)
    metrics = trainer._update_actor(None).meta_info["metrics"]
    assert metrics["actor/loss"] == [1.0]
    assert metrics["similarity_groups/n_single_member_groups"] == 1
    assert metrics["similarity_groups/avg_silhouette_score"] == pytest.approx(sum(scores) / 2)


@pytest.fixture(scope="module")
def pool(ray_cluster):
    """verl's reservation of both GPUs, as its trainer makes it."""
    manager = ResourcePoolManager({"global_pool": [2]}, {})
    manager.create_resource_pool()
    groups = manager.resource_pool_dict["global_pool"].get_placement_groups()
    yield manager
    for group in groups:
        ray_cluster.util.remove_placement_group(group)


def test_workers_share_reserved_gpus(pool, ray_cluster):
    assert ray_cluster.available_resources().get("GPU", 0) == 0
    said = []
    texts = [ANSWERS["u"], ANSWERS["u"][::-1], ANSWERS["u"][1:] + ANSWERS["u"][:1]]
    grouper = verl_grouper(SETTINGS, pool, said.append)
    try:
        assert isinstance(grouper, BundleGrouper)
        assert len(set(grouper.pids)) == 2
        assert said == [
            "[RayPPOTrainer] Creating 2 similarity grouper workers...",
            "[SimilarityGrouperWorker] Loading model: wordllama",
        ]
        result = grouper.group(texts)
    finally:
        grouper.close()
    expected = group_texts(load_embedder("wordllama"), texts, SETTINGS)
    assert torch.equal(result.labels, expected.labels)
    torch.testing.assert_close(result.scores, expected.scores)


def test_more_workers_than_gpus_share_them(pool):
    grouper = verl_grouper(SETTINGS.model_copy(update={"workers": 3}), pool, lambda _: None)
    try:
        assert len(set(grouper.pids)) == 3
    finally:
        grouper.close()


def test_grouping_in_the_trainers_process(pool):
    empty = ResourcePoolManager({}, {})
    assert gpu_bundles(empty) == []
    for settings, manager in [(SETTINGS, empty), (SETTINGS.model_copy(update={"device": "cpu"}), pool)]:
        assert isinstance(verl_grouper(settings, manager, lambda _: None), LocalGrouper)
    said = []
    assert isinstance(verl_grouper(SETTINGS.model_copy(update={"workers": 0}), pool, said.append), LocalGrouper)
    assert said == ["[SimilarityGrouperWorker] Loading model: wordllama"]

"""The sections of a recipe: every setting, its type, its default, and its line in ``--help`` (the docstring).

A section's own docstring is its line in the list of sections.

The Literals repeat the choices of `core` and other packages, because mypy needs them written out; the names of losses
are repeated because importing `core` loads torch, for which ``--help`` should not wait. A test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from groupwise.algorithms import ALGORITHMS
from groupwise.errors import MAX_FLOAT32, MAX_TEMPERATURE, MIN_TEMPERATURE
from groupwise.redaction import hold_secrets, without_secrets

LOSS_NAMES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo", "reinforce")
PREFERENCE_KINDS = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
OPTIMIZERS = ("adamw", "sgd", "adagrad", "rmsprop", "adafactor")
OWN_LENGTHS = ("steps", "tokens", "epochs")  # of a phase that does not depend on the length of the run

Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
# AdamW moves a weight by about its learning rate in each step: above 1 nothing is learned, the weights only overflow.
Rate = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
TwoNumbers = Annotated[list[Positive], Field(min_length=2, max_length=2)]
Options = Annotated[dict[str, Any], AfterValidator(hold_secrets)]
"""Arguments of a user's or a plug-in's own: a secret among them is a `Secret`."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class LoraSection(Section):
    """a LoRA adapter instead of all weights"""

    rank: Count = 16
    """LoRA rank"""
    alpha: Positive = 32.0
    """LoRA scaling, alpha / rank"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """LoRA dropout; above 0, on-policy ratios differ from 1"""
    targets: str | list[str] = "all-linear"
    """the layers that get an adapter, by the last part of their names"""
    rslora: bool = False
    """scale by alpha / √rank instead (rsLoRA)"""


class ModelSection(Section):
    """the model: source, dtype, device, LoRA ([model.lora])"""

    source: str = "tiny"
    """a folder, a .gguf file, a name from `groupwise models list`, "tiny", or a hub id owner/name"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """dtype of the forward and backward pass; auto is bfloat16 where the hardware supports it, else float32"""
    device: str = "auto"
    """auto is the first CUDA device, else Apple's MPS, else the CPU"""
    threads: Count | None = None
    """number of CPU threads; default: all cores. Models below a million parameters are fastest with one"""
    float32_head: bool = False
    """compute the logits of a bfloat16 or float16 model in float32, in sampling and in training, without rounding them
    (ScaleRL, arXiv 2510.13786); it has no effect on vLLM"""
    gradient_checkpointing: bool = True
    """recompute activations in the backward pass: less memory, about a third more time"""
    compile: bool | None = None
    """use torch.compile; default: on a GPU in half precision"""
    sharding: Literal["optimizer", "weights"] = "optimizer"
    """what several processes divide among them: masters and optimizer state (ZeRO-1), or all weights as well (FSDP2)"""
    lora: LoraSection | None = None
    """train a LoRA adapter instead of all weights ([model.lora], needs the extra `lora`)"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model"""
    revision: str | None = None
    """the revision of a model on the hub"""

    @property
    def has_dropout(self) -> bool:
        """Whether training has dropout, so that each forward pass gives other log-probs."""
        return self.lora is not None and self.lora.dropout > 0


class SourcesSection(Section):
    """Sources of rows for training and for evaluation."""

    train: str | list[str] | None = None
    """training rows: .jsonl, .json, .parquet, .csv, a folder of these, a hub dataset owner/name, or a list of such"""
    held_out: str | list[str] | None = None
    """evaluation rows, never trained on"""
    held_out_from_train: CountOrZero = 0
    """hold out this many random rows of the first training source for evaluation"""
    subset: str | None = None
    """the configuration of a hub dataset"""
    train_split: str | None = None
    """the split of a hub dataset to train on"""
    held_out_split: str | None = None
    """the split of a hub dataset to evaluate on"""
    train_rows: Count | None = None
    """use only the first N training rows (generated tasks: generate N)"""
    held_out_rows: Count | None = None
    """use only the first N evaluation rows (generated tasks: generate N)"""


class DataSection(SourcesSection):
    """training and held-out rows, and how a row becomes a prompt"""

    prompt: str = "prompt"
    """the column with the prompt: a text or a list of chat messages"""
    system_prompt: str | None = None
    """a system message put before every prompt"""
    chat: bool | None = None
    """apply the chat template to text prompts, as a user message; default: if the tokenizer has one"""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """extra arguments of the chat template, e.g. {enable_thinking = false}"""
    assistant_last: bool = False
    """conversations may end with a message of the assistant; the answer is then another one (as in TRL)"""
    max_prompt_length: Count | None = 512
    """maximum prompt length in tokens"""
    on_too_long: Literal["error", "drop", "truncate"] = "error"
    """a longer prompt: raise an error, drop the row, or keep only the last tokens"""
    shuffle: bool = True
    """shuffle the rows in every epoch, from the seed"""
    sampling: Literal["uniform", "pass_rate"] = "uniform"
    """every row once per epoch, or by running pass rate: solved rows are mostly skipped, unsolved rows drawn less"""
    solved_pass_rate: Share = 0.9
    """pass_rate: a row counts as solved from this pass rate on"""
    solved_share: Share = 0.1
    """pass_rate: share of epochs in which a solved row is drawn nevertheless, to notice if it was forgotten"""
    unsolved_pass_rate: Share = 0.05
    """pass_rate: a row counts as unsolved up to this pass rate"""
    unsolved_share: Share = 0.5
    """pass_rate: share of epochs in which an unsolved row is drawn"""
    pass_rate_memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """pass_rate: weight of the earlier visits of a row in its pass rate; 0 is only the last visit"""


class RewardSection(Section):
    """reward functions and their weights; any number of [[rewards]]"""

    function: str
    """module:function, file.py:function, or the name of a built-in reward"""
    weight: Finite = 1.0
    """factor of this reward in the sum"""
    name: str | None = None
    """name in metrics and rollouts; default: the function's"""
    options: Options = Field(default_factory=dict)
    """arguments, if the function creates the reward instead of being it"""


class ScoringSection(Section):
    """calling the rewards: time limit, errors, penalty on length"""

    timeout: Positive | None = 60.0
    """time limit of one call of a reward function, in seconds"""
    on_error: Literal["stop", "drop"] = "stop"
    """a reward function that fails: stop the run, or drop and count the sample"""
    concurrency: Count = 32
    """with train.max_staleness: groups that are scored at once, each in its own thread; 1 for rewards that are not
    thread-safe"""
    overlong_buffer: CountOrZero = 0
    """soft penalty on the last N tokens before max_new_tokens (DAPO, arXiv 2503.14476); 0 is off. Of a conversation the
    sampled tokens of all turns count, of at most environment.max_turns × max_new_tokens or environment.max_tokens"""
    overlong_weight: NotNegative = 1.0
    """the penalty of a completion of full length"""
    length_penalty: NotNegative = 0.0
    """penalty on length that grows with the prompt's success rate (ALP, arXiv 2506.05256): that of a completion of
    max_new_tokens where all completions succeed; 0 is off. Of a conversation, as for overlong_buffer"""
    success_threshold: Finite = 0.5
    """a completion succeeds if the weighted sum of its rewards is at least this (length_penalty,
    advantages.pass_at_k)"""


class SamplingSection(Section):
    """completions per prompt, their length, temperature, top-k, top-p"""

    samples_per_prompt: Count = 8
    """G: completions per prompt"""
    max_new_tokens: Count = 256
    """maximum completion length in tokens"""
    min_new_tokens: CountOrZero = 0
    """minimum completion length in tokens: EOS cannot be sampled before"""
    temperature: Temperature = 1.0
    """divides the logits, in sampling and in training; below 1e-6 they would overflow (top_k = 1 is greedy)"""
    top_k: CountOrZero | None = None
    """sample from the k most likely tokens only"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the smallest set of tokens with this total probability"""
    min_p: Share | None = None
    """sample from tokens with at least this share of the highest probability"""
    repetition_penalty: Positive = 1.0
    """divides the positive logits, and multiplies the negative ones, of tokens that are in the prompt or the completion
    already; above 1 they become less likely. Only in sampling: the loss is that of the model itself"""
    order: Literal["transformers", "vllm", "mlx_lm"] = "transformers"
    """order of the filters: temperature, top_k, top_p, min_p (transformers); temperature, min_p, top_k, top_p (vllm);
    top_k, min_p, top_p on the probabilities at temperature 1, then temperature (mlx_lm)"""
    stop: list[str] = Field(default_factory=list)
    """stop strings that end a completion"""
    max_num_seqs: Count | None = None
    """maximum number of completions generated at once"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """how the engine stores keys and values: as the model computes them (auto), or rounded to eight bits (fp8), which
    halves the memory and what a step reads, but samples from a slightly different model than the one that is trained;
    sampler/logp_difference_mean shows by how much, and loss.importance_cap corrects it"""
    generator: str = "engine"
    """what samples: "engine" (groupwise's own), "vllm" ([vllm]), or the name of an installed plug-in"""


class EnvironmentSection(Section):
    """tools and environments: conversations of several turns"""

    tools: list[str] = Field(default_factory=list)
    """functions that the model may call, as module:function or file.py:function, or built in: arithmetic, python"""
    factory: str | None = None
    """an environment, as module:Class or file.py:Class: reset(**row), methods as tools, get_reward(), as in TRL, or
    groupwise's own form"""
    rollout: str | None = None
    """a function of your own that leads a conversation, as module:function or file.py:function: `rollout(model, row)`
    asks the model for its turns, and returns the reward"""
    max_turns: Count = 10
    """turns of the model in a conversation"""
    max_tokens: Count | None = None
    """tokens of a conversation after its prompt, sampled and given; default: what the model's context holds"""
    max_tool_calls: Count = 50
    """tool calls in a conversation"""
    max_reply_chars: Annotated[int, Field(ge=100, lt=2**31)] = 20_000
    """characters of one message of a tool or environment; a longer one loses its middle"""
    turn_seconds: Positive = 60.0
    """time limit of an environment's answer to a turn, with its tool calls, and of a rollout function from one turn of
    the model to its next request"""
    tool_seconds: Positive = 20.0
    """time limit of one tool call"""
    wait_seconds: Positive = 120.0
    """time limit of an environment's start, of its reward and of its end, and of a rollout function's first
    request"""
    retries: CountOrZero = 1
    """how often a conversation whose environment failed is begun again; then its group is left out"""
    call_format: str | None = None
    """how the model writes tool calls, such as "hermes"; default: by its chat template"""
    chat_template: str | None = None
    """file with a chat template that keeps earlier turns as they were; default: the model's"""
    allow_network: bool = False
    """the tool python may run where its network cannot be taken away"""


class VllmSection(Section):
    """vLLM as the generator: servers, or in this process"""

    servers: list[str] = Field(default_factory=list)
    """addresses of vLLM servers, such as http://host:8000; without any, vLLM runs in this process"""
    weights: Literal["folder", "nccl"] = "folder"
    """how new weights reach the servers: as files in a folder that all of them can read, or by vLLM's NCCL transfer"""
    folder: str | None = None
    """the folder for the weights, with the same path on every machine; default: a temporary one on this machine"""
    api_key_env: str | None = None
    """the environment variable that holds the servers' API key (vLLM's --api-key)"""
    timeout: Positive = 600.0
    """maximum time of one request in seconds: the completions of a prompt, or loading the weights"""
    wait: Positive = 300.0
    """how long to wait for a server if none can be used, in seconds; then the run ends"""
    nccl_host: str = "127.0.0.1"
    """nccl: address of this machine that the servers can reach"""
    nccl_port: Annotated[int, Field(ge=1, lt=2**16)] = 29600
    """nccl: first port of the transfer; each server takes one"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """in this process: share of the GPU's memory that vLLM may use"""
    sleep: bool = True
    """in this process, on a GPU: free vLLM's memory while the model is trained"""
    enforce_eager: bool = False
    """in this process: no torch.compile and no CUDA graphs in vLLM; it starts faster and samples slower"""


class AdvantagesSection(Section):
    """baseline, scale and groups of the advantages"""

    scale: Literal["group", "batch", "batch_advantages", "mean", "none"] = "group"
    """divide by the standard deviation of the group's rewards, of the batch's, of the batch's advantages (ScaleRL,
    arXiv 2510.13786), by the group's mean (MaxRL, arXiv 2602.02710; for rewards of at least 0), or not at all"""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """subtracted from the rewards: the group's mean, the mean of the others, or nothing"""
    eps: NotNegative = 1e-4
    """added to the standard deviation or mean"""
    unbiased: bool = True
    """standard deviation with n − 1 in the denominator instead of n"""
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """several rewards: normalize their sum, or sum their normalized values (GDPO)"""
    function: str | None = None
    """your own advantage, module:function(rewards (B, K), groups (B,), weights) -> (B,)"""
    grouping: str = "prompt"
    """which completions form a group: "prompt", "similarity" ([grouping]), or module:function(batch) -> labels"""
    turn_weight: NotNegative = 0.0
    """with an environment: weight of a turn's advantage among the turns of its group at the same state, beside the
    conversation's (GiGPO, arXiv 2505.10978); 0 is off"""
    turn_discount: Share = 0.95
    """turn_weight: factor per turn of the rewards that come later"""
    shrinkage: NotNegative = 0.0
    """shrink a cluster's mean towards its prompt's mean, which counts as this many samples; 0 is off"""
    difficulty: Literal["none", "hard", "uncertain"] = "none"
    """weight groups by difficulty: more for a low success rate (hard), or for one near 1/2 (uncertain)"""
    pass_at_k: Count | None = None
    """advantages of pass@k: learn that one of k completions succeeds (arXiv 2508.10751); 1 is GRPO on success"""


class GroupingSection(Section):
    """clusters of similar completions (advantages.grouping similarity)"""

    embedder: str = "BAAI/bge-m3"
    """text embedding model: "minilm", "wordllama", a sentence-transformers folder, or a hub id owner/name"""
    device: str = "auto"
    """device of the embedder; auto is CUDA, else Apple's MPS, else the CPU"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the embedder; auto is bfloat16 on a GPU, else float32"""
    batch_size: Count = 64
    """texts per forward pass of the embedder"""
    cache: CountOrZero = 20_000
    """number of embeddings to cache; 0 is off"""
    text_after: str | None = "</think>"
    """compare only the text after the last occurrence of this mark; none compares complete completions"""
    method: Literal["average", "ward_rows", "threshold", "adaptive", "dbscan"] = "average"
    """how the completions of a prompt are clustered (docs/creative.md)"""
    max_groups: Annotated[int, Field(ge=2)] = 7
    """average, ward_rows, adaptive: maximum number of clusters of a prompt"""
    min_silhouette: Annotated[float, Field(ge=-1, le=1)] = 0.1
    """average, ward_rows, adaptive: below this silhouette score, all completions are one cluster"""
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.7
    """threshold, dbscan: texts are similar above this cosine similarity (dbscan: or equal to it)"""
    min_samples: Count = 2
    """dbscan: minimum number of similar completions, itself included, of a core point"""
    levels: Annotated[int, Field(ge=2)] = 2
    """2 is prompt and cluster; each further level splits the clusters again by the same method"""
    skip_single_members: bool = False
    """compute no reward for a completion that is alone in its cluster: its advantage is 0"""
    log_diversity: bool = False
    """cluster and log the diversity even if advantages.grouping does not use clusters"""
    workers: CountOrZero | None = None
    """Ray workers that embed and cluster; 0 is this process. Default: one per GPU, up to 8, with two GPUs or more"""
    ray_address: str | None = None
    """address of an existing Ray cluster; default: start one on this machine"""
    ray_host: str = "127.0.0.1"
    """address that a new Ray cluster listens on; others than the default are reachable from other machines"""

    @property
    def limit(self) -> str:
        """The setting to lower for fewer clusters."""
        return "grouping.threshold" if self.method in ("threshold", "dbscan") else "grouping.max_groups"


class LossSection(Section):
    """the policy loss: name, clipping, KL, entropy"""

    name: str = "dapo"
    """one of {names}, or module:function of your own (one number per token)"""
    policy_coef: NotNegative = 1.0
    """weight of the policy loss; 0 leaves it out (with [preference]: DPO, with [distillation]: a teacher alone)"""
    aggregation: (
        Literal["sequence_mean", "sequence_sum", "token_mean", "local_token_mean", "prompt_mean", "constant"] | None
    ) = None
    """how the tokens of a batch are averaged, in place of the loss's own way (docs/algorithms.md); prompt_mean is the
    mean over a prompt's tokens, then over prompts (ScaleRL, arXiv 2510.13786)"""
    ratio: Literal["token", "sequence", "sequence_product"] | None = None
    """importance ratio per token, or per sequence: the geometric mean over its tokens (sequence) or their product
    (sequence_product); default: the loss's own"""
    clip_low: NotNegative = 0.2
    """ε: the ratio is clipped below 1 − ε"""
    clip_high: NotNegative | None = None
    """ε_high: the ratio is clipped above 1 + ε_high; default: clip_low (cispo: the upper bound itself, 5)"""
    dual_clip: Annotated[float, Field(gt=1, le=MAX_FLOAT32, allow_inf_nan=False)] | None = None
    """upper bound of the ratio for negative advantages (dual-clip PPO)"""
    sapo_temperatures: TwoNumbers = [1.0, 1.05]
    """sapo: temperatures for positive and for negative advantages"""
    vespo_positive: TwoNumbers = [2.0, 3.0]
    """vespo: k and λ for positive advantages"""
    vespo_negative: TwoNumbers = [3.0, 2.0]
    """vespo: k and λ for negative advantages"""
    denominator: Literal["completion_mask", "policy_mask"] = "completion_mask"
    """means are over all completion tokens, or only over those that [masks] leaves"""
    kl_coef: NotNegative = 0.0
    """β: weight of the KL to the reference model"""
    kl: Literal["k1", "k2", "k3", "unbiased", "full", "full_ratio_weighted"] = "k3"
    """the KL: an estimator (unbiased: DeepSeek-V3.2, arXiv 2512.02556), the exact KL over the vocabulary (full), or
    that times the mean of π_θ/π_ref (full_ratio_weighted)"""
    kl_aggregation: Literal["loss", "token_mean"] = "loss"
    """the KL of a batch: aggregated over tokens like the policy loss (as in TRL), or the mean over all tokens"""
    entropy_coef: Finite = 0.0
    """weight of the entropy bonus; with entropy_target its first value"""
    entropy_target: Positive | None = None
    """adapt the weight of the entropy bonus to this entropy in nats per token (Skywork-OR1, arXiv 2505.22312): it grows
    after an update whose entropy was at or below the target, else it shrinks and is not applied in the next update"""
    entropy_step: Positive = 0.005
    """entropy_target: how much the weight changes after each update"""
    entropy_coef_min: Finite = 0.0
    """entropy_target: the smallest weight"""
    entropy_coef_max: Finite = 1.0
    """entropy_target: the largest weight"""
    importance_cap: Positive | None = None
    """truncated importance sampling: weight tokens by trainer / sampler probability, at most this (TIS)"""
    importance_floor: Positive | None = None
    """the same weight, at least this"""
    importance_sampling: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """the weight of a token, or of its sequence; outside importance_floor and importance_cap it is truncated, or the
    token or sequence is masked (token_mask is IcePop)"""
    importance_normalize: bool = False
    """divide the weights by their mean over the batch (self-normalized importance sampling)"""
    rejection: Literal["geometric", "product", "any_token", "k3"] = "geometric"
    """what rejection_low and rejection_high limit, of trainer / sampler probability over a completion: the geometric
    mean, the product, each token, or the mean of k3 (rejection_high only)"""
    rejection_low: Positive | None = None
    """mask completions whose statistic (loss.rejection) is below this"""
    rejection_high: Positive | None = None
    """mask completions whose statistic (loss.rejection) is above this"""


class PreferenceSection(SourcesSection):
    """a preference loss (DPO and its relatives) on pairs"""

    weight: NotNegative = 0.0
    """w₂: weight of the preference loss on pairs (docs/preference.md); 0 is off"""
    beta: Positive = 0.1
    """β of DPO: the smaller, the further the policy may move from the reference"""
    kind: str | list[str] = "sigmoid"
    """the preference loss, or several that are summed: {names}"""
    kind_weights: list[Finite] | None = None
    """a weight for each kind; default: 1"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """probability that a pair is labelled the wrong way round, for the kinds robust, aot, aot_unpaired and exo_pair"""
    discopop_tau: Positive = 0.05
    """temperature of the kind discopop"""
    pairs: Literal["group", "data", "both"] = "group"
    """source of pairs: the completions of a prompt, ranked by reward; a dataset (preference.train); or both"""
    pairs_per_group: Count = 1
    """pairs of a group: best and worst, second best and second worst, and so on"""
    min_margin: NotNegative = 0.0
    """the rewards of a group's pair must differ by more than this"""
    reward: str | None = None
    """name of the reward that ranks a group; default: the weighted sum of all"""
    prompt: str = "prompt"
    """the column with the prompt; without it, the prompt is the common beginning of chosen and rejected"""
    chosen: str = "chosen"
    """the column with the chosen completion: a text, a message or messages"""
    rejected: str = "rejected"
    """the column with the rejected completion"""
    batch_size: Count = 16
    """pairs of the dataset per step"""
    max_length: Count | None = 1024
    """maximum length of the prompt and the longer completion, in tokens"""
    on_too_long: Literal["error", "drop", "truncate"] = "drop"
    """a longer pair: raise an error, drop it, or truncate its completions at the end"""
    shuffle: bool = True
    """shuffle the pairs in every epoch, from the seed"""
    cache_ref_logps: bool = True
    """keep the reference log-probs of the dataset's pairs on disk; false computes them in each step"""

    @property
    def kinds(self) -> list[str]:
        return [self.kind] if isinstance(self.kind, str) else self.kind


class DistillationSection(Section):
    """on-policy distillation: a teacher scores the student's samples"""

    weight: NotNegative = 0.0
    """weight of the reverse KL to the teacher (docs/distillation.md); 0 is off"""
    teacher: str | None = None
    """a model as in model.source, beside the policy; "policy": the policy itself, "reference": the reference
    ([reference]), both with show"""
    server: str | None = None
    """the teacher's vLLM or OpenAI-like server, such as http://host:8000, in place of teacher"""
    kl: Literal["full", "sampled"] = "full"
    """the exact KL over the vocabulary, or log π_θ − log π_T of the sampled tokens as their advantages"""
    top_k: Annotated[int, Field(ge=1, le=1000)] = 20
    """server, kl full: ask for the log-probs of this many tokens; all others count as one"""
    show: str | None = None
    """what the teacher is shown and the student is not: a column of the rows, or its prompt as a template with columns
    in braces"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """dtype of the teacher's weights; auto is as in model.dtype"""
    revision: str | None = None
    """the revision of a teacher on the hub"""
    api_key_env: str | None = None
    """server: the environment variable that holds its API key"""
    timeout: Positive = 600.0
    """server: maximum time of one request in seconds"""
    wait: Positive = 300.0
    """server: how long to ask again if it does not answer, in seconds; then the run ends"""
    concurrency: Count = 32
    """server: requests at once, of a completion each"""

    @property
    def is_model(self) -> bool:
        """Whether the teacher is a model of its own, to be loaded."""
        return self.teacher is not None and self.teacher not in ("policy", "reference")


class MasksSection(Section):
    """completions and tokens that are left out of the policy loss"""

    truncated: bool = False
    """mask completions that were truncated by max_new_tokens"""
    drop_truncated: bool = False
    """drop such completions: also from the KL and the entropy, and from the number of tokens that means divide by (as
    TRL's mask_truncated_completions)"""
    drop_equal_rewards: bool = False
    """drop groups whose rewards are all equal: from all terms, from the numbers of tokens, completions and prompts that
    means divide by, and from the standard deviation of advantages.scale batch and batch_advantages (ScaleRL's
    zero-variance filtering)"""
    off_policy: Literal["v3.2", "reference_drift"] | None = None
    """mask completions with a negative advantage that the policy has moved away from (v3.2: DeepSeek-V3.2), or those
    that became more likely than under the reference (reference_drift)"""
    off_policy_threshold: Positive = 0.5
    """v3.2: above this mean of log π_old − log π_θ over a completion's tokens; reference_drift: from this sum of
    log π_θ − log π_ref on"""
    divergence: Literal["tv", "kl"] | None = None
    """in place of the ratio's clip, mask tokens whose probability has moved further from the sampler's than
    divergence_threshold and would move on: by total variation, or by KL (DPPO, arXiv 2602.04879)"""
    divergence_threshold: Positive | None = None
    """default: 0.15 for tv, 0.05 for kl"""
    validity: bool = False
    """mask completions that are too short, repetitive, or without an extractable answer"""
    min_length: CountOrZero = 10
    """validity: minimum number of characters"""
    max_repetition: Share = 0.5
    """validity: maximum share of repeated word trigrams"""
    high_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """train only on this share of tokens, those with the highest entropy"""
    keep_sampling_mask: bool = False
    """renormalize the policy over the tokens that top-k, top-p and min-p left in sampling (DeepSeek-V3.2)"""


class ReferenceSection(Section):
    """when the reference model is updated from the policy"""

    refresh_every: CountOrZero = 0
    """update the reference from the policy every N steps; 0 is never"""
    mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the policy in the updated reference; 1 replaces it"""


class OptimizerSection(Section):
    """the optimizer: learning rates, schedule, gradient clipping"""

    name: str = "adamw"
    """one of {names}, or module:Class of another torch optimizer; on float32 master weights"""
    options: Options = Field(default_factory=dict)
    """further arguments of the optimizer, such as momentum"""
    learning_rate: Rate = 1e-6
    """learning rate, before warm-up and decay"""
    embedding_learning_rate: Rate | None = None
    """learning rate of the token embeddings, unless they are tied to the output head; default: learning_rate"""
    tied_embedding_rate: bool = False
    """use embedding_learning_rate for tied embeddings too"""
    weight_decay: NotNegative = 0.0
    """of matrices; norms and biases have none"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's β₁"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's β₂"""
    eps: Annotated[float, Field(ge=1e-20, le=1)] = 1e-8
    """AdamW's ε"""
    max_grad_norm: Positive | None = 1.0
    """gradients are clipped to this norm"""
    warmup_steps: CountOrZero = 0
    """steps of linear learning-rate warm-up"""
    warmup_from_zero: bool = False
    """the warm-up's first step has rate 0 (as in transformers) instead of learning_rate / warmup_steps"""
    lr_schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "constant"
    """learning-rate decay after the warm-up; all but constant, linear and cosine are those of transformers"""
    lr_schedule_options: Options = Field(default_factory=dict)
    """arguments of a schedule of transformers, such as num_cycles"""
    final_lr_ratio: Share = 0.0
    """final learning rate as a share of learning_rate"""


class SftSection(Section):
    """supervised steps on a task's examples before GRPO"""

    steps: CountOrZero = 0
    """supervised steps on the task's examples before the first GRPO step, to learn the answer format"""
    epochs: Positive | None = None
    """passes over the examples; overrides steps"""
    batch_size: Count = 32
    """examples per step"""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """of AdamW"""


class TrainSection(Section):
    """steps, batch size, accumulation, updates per rollout, seed"""

    steps: CountOrZero | None = None
    """number of steps; overrides epochs, and ends a run within its [[phases]]. 0 runs only [sft]"""
    epochs: Positive | None = 3.0
    """number of passes over the training rows; not used if each of the [[phases]] has its own length"""
    batch_size: Count = 4
    """prompts per accumulation step"""
    accumulation: Count = 4
    """gradient accumulation: a step has batch_size × accumulation prompts"""
    iterations: Count = 1
    """number of passes over a batch (μ in the GRPO paper)"""
    mini_batches: Count = 1
    """number of updates in one pass over a batch; each is normalized by itself"""
    update_per_step: bool = False
    """a step is one update (as in TRL), and a batch is used in iterations × mini_batches steps"""
    mini_batch_by: Literal["prompts", "samples"] = "prompts"
    """what is shuffled into mini-batches: prompts with all of their completions, or completions (as in TRL)"""
    local_batch_size: Count | None = None
    """completions over which bnpo's mean, the entropy bonus and masks.high_entropy are computed, such as TRL's
    per_device_train_batch_size; default: all of a mini-batch"""
    token_budget: Count | None = None
    """tokens per forward and backward pass; default: what fits into memory. It does not change the result"""
    resample_rounds: CountOrZero = 0
    """maximum number of extra rollout rounds to replace prompts without learning signal (dynamic sampling, DAPO)"""
    skip_equal_rewards: bool = True
    """skip groups with equal rewards in the update, unless a KL or entropy term needs them"""
    max_staleness: Annotated[int, Field(ge=0, le=100)] = 0
    """asynchronous rollouts: sample ahead, and learn from completions of weights up to this many steps old (0: off)"""
    replay: str | None = None
    """repeat an asynchronous run: its folder, whose arrivals.jsonl says which groups to learn from in each step"""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """NaN or inf in the loss or gradient: stop before the weights change, or skip the update and count it"""
    max_logp_mismatch: Positive = 0.05
    """warn if the mean difference of a token's log-prob between sampler and trainer is above this"""
    log_term_gradients_every: CountOrZero = 0
    """every N steps, log each objective term's gradient norm and the cosines between them; 0 is never"""
    timeout: Positive = 1800.0
    """with several processes, seconds that they wait for one that does not answer before the run ends"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """seed of the row order, the sampling and the adapter's initialization"""

    @property
    def prompts_per_step(self) -> int:
        """The prompts of a rollout."""
        return self.batch_size * self.accumulation

    @property
    def steps_per_rollout(self) -> int:
        """The steps in which a rollout is used."""
        return self.iterations * self.mini_batches if self.update_per_step else 1


class EvaluateSection(Section):
    """evaluation on the held-out rows, early stopping"""

    every: CountOrZero = 0
    """evaluate on the held-out rows every N steps; 0 is only at the end"""
    before_training: bool = True
    """also evaluate before the first step"""
    samples: Count = 1
    """completions per row, averaged"""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 0.0
    """temperature: 0 (greedy), or at least 1e-6"""
    max_new_tokens: Count | None = None
    """maximum completion length in tokens; default: as in training"""
    metric: str | None = None
    """the metric that selects the best checkpoint; default: the task's"""
    rewards: bool = False
    """also score the completions with the rewards, if the task has grades, and report each reward's mean and std"""
    patience: Count | None = None
    """early stopping: evaluations without improvement before the run stops"""


class RunSection(Section):
    """the run's folder, checkpoints, logs, hub"""

    folder: str | None = None
    """the run's folder; default: a new one below runs/"""
    name: str | None = None
    """part of the new folder's name; default: the recipe's"""
    log_every: Count = 1
    """steps between two lines if the output is not a terminal; metrics.jsonl has every step"""
    show_samples: CountOrZero = 2
    """completions of the last step to show, with their rewards: the best and the worst of one group first; 0: none"""
    checkpoint_every: CountOrZero = 50
    """steps between checkpoints; 0 is only at the end"""
    keep_checkpoints: Count = 2
    """number of checkpoints to keep, besides the best one"""
    resumable: bool = True
    """save master weights and optimizer state (16 bytes per weight); false saves only the policy: no --resume"""
    kl_warning: Positive = 0.5
    """warn if the KL to the reference is above this, as a mean over ten steps"""
    save_rollouts: bool = True
    """save prompts, completions and rewards, one Parquet file per step, and held-out completions"""
    save_tokens_every: CountOrZero = 10
    """steps between two whose log-probs and entropy are saved token by token, with save_rollouts; 0 saves none"""
    save_tokens_prompts: Count = 2
    """prompts of such a step that are saved with all of their completions: those whose rewards differ most"""
    tensorboard: bool | None = None
    """write TensorBoard events; default: if tensorboardX is installed"""
    wandb: str | None = None
    """the Weights & Biases project to log to"""
    plot: bool = True
    """plot the learning curves at the end"""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the saved model; default: the dtype of training"""
    push_to_hub: str | None = None
    """the hub repository, owner/name, to push the final model to"""


class Recipe(Section):
    """All settings of a run."""

    task: str = "rows"
    """the task's name ("rows": your own data and rewards), or module:function that returns a Task"""
    task_options: Options = Field(default_factory=dict)
    """the task's own settings, also as --task_options.KEY VALUE; `groupwise check RECIPE` shows them"""
    algorithm: str = "dapo"
    """the preset of defaults: {names}"""
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    rewards: list[RewardSection] = Field(default_factory=list)
    """[[rewards]]: added to the task's own"""
    scoring: ScoringSection = Field(default_factory=ScoringSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    vllm: VllmSection = Field(default_factory=VllmSection)
    advantages: AdvantagesSection = Field(default_factory=AdvantagesSection)
    grouping: GroupingSection = Field(default_factory=GroupingSection)
    loss: LossSection = Field(default_factory=LossSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    distillation: DistillationSection = Field(default_factory=DistillationSection)
    masks: MasksSection = Field(default_factory=MasksSection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    sft: SftSection = Field(default_factory=SftSection)
    train: TrainSection = Field(default_factory=TrainSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    run: RunSection = Field(default_factory=RunSection)
    phases: list[dict[str, Any]] = Field(default_factory=list)
    """[[phases]]: settings for a number of steps, tokens, epochs, or a share of the run, one phase after another"""
    ramps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """[ramps]: settings that are interpolated between points"""
    rules: list[dict[str, Any]] = Field(default_factory=list)
    """[[rules]]: settings that change when a metric crosses a threshold"""

    @property
    def ends_with_phases(self) -> bool:
        """Whether the run ends with its last phase: each has its own length, and train.steps is not set."""
        own = [any(phase.get(unit) is not None for unit in OWN_LENGTHS) for phase in self.phases]
        return self.train.steps is None and bool(own) and all(own)

    @property
    def taught(self) -> bool:
        """Whether a step learns from a teacher alone: rewards, if there are any, are only reported."""
        return bool(self.distillation.weight) and not (self.loss.policy_coef or self.preference.weight)

    def recorded(self) -> dict[str, Any]:
        """Every setting, for files and reports: ``***`` in place of secrets."""
        settings: dict[str, Any] = without_secrets(self.model_dump())
        return settings

    def get(self, name: str) -> Any:
        """The value of a dotted setting; None in a section that is off."""
        value: Any = self
        for part in name.split("."):
            if value is not None:
                value = value.get(part) if isinstance(value, dict) else getattr(value, part)
        return value


def _fill(model: type[Section], key: str, names: Iterable[str]) -> None:
    """Put the existing names into the description of a setting."""
    field = model.model_fields[key]
    field.description = str(field.description).format(names=", ".join(names))


_fill(LossSection, "name", LOSS_NAMES)
_fill(OptimizerSection, "name", OPTIMIZERS)
_fill(PreferenceSection, "kind", PREFERENCE_KINDS)
_fill(Recipe, "algorithm", ALGORITHMS)

"""The sections of a recipe: every setting, typed, with the sentence that ``--help`` shows. The classes are the record;
what is done with them stands beside this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from groupwise.algorithms import ALGORITHMS
from groupwise.core.advantages import BASELINES, COMBINATIONS, SCALES
from groupwise.core.kl import ESTIMATORS
from groupwise.core.losses import DENOMINATORS, LOSSES, RATIOS
from groupwise.core.masks import OFF_POLICY_RULES
from groupwise.core.preference import KINDS

KL_FORMS = (*ESTIMATORS, "full", "full_ratio_weighted")  # the last two need whole distributions: `core.full_kl`

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class LoraSection(Section):
    rank: Count = 16
    """width of the adapter"""
    alpha: Positive = 32.0
    """how loudly the adapter speaks, relative to its rank"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout in front of the adapter; any makes on-policy ratios differ from 1"""
    targets: str | list[str] = "all-linear"
    """which layers get an adapter, by the last part of their name"""
    rslora: bool = False
    """scale by alpha / √rank"""


class ModelSection(Section):
    source: str = "tiny"
    """a folder, a .gguf file, a name of `groupwise models list`, "tiny", or a hub id owner/name"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """what the model computes in; auto is bfloat16 where the device has it in hardware, else float32"""
    device: str = "auto"
    """auto is the first CUDA device where there is one, else the CPU"""
    threads: Count | None = None
    """CPU threads; by default as many as there are cores. A model of less than a million weights is fastest with one"""
    gradient_checkpointing: bool = True
    """compute activations again in the backward pass instead of keeping them: less memory, a third more time"""
    compile: bool | None = None
    """fuse layers with torch.compile; by default on a GPU in half precision"""
    lora: LoraSection | None = None
    """train a small adapter instead of all weights ([model.lora], needs the extra `lora`)"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    revision: str | None = None
    """the version of a model on the hub"""


class SourcesSection(Section):
    """Where rows come from: those to train on, and those that are held out."""

    train: str | list[str] | None = None
    """rows to train on: .jsonl, .json, .parquet, .csv, a folder of them, a hub data set owner/name, or several"""
    held_out: str | list[str] | None = None
    """rows to evaluate on; never trained on"""
    held_out_from_train: CountOrNone = 0
    """evaluate on so many rows, drawn by the seed, of the first source to train on, and do not train on them"""
    subset: str | None = None
    """the configuration of a hub data set"""
    train_split: str | None = None
    """the split of a hub data set to train on"""
    held_out_split: str | None = None
    """the split of a hub data set to evaluate on"""
    train_rows: Count | None = None
    """use only the first so many rows (for generated tasks: make so many)"""
    held_out_rows: Count | None = None
    """evaluate on only the first so many rows (for generated tasks: make so many)"""


class DataSection(SourcesSection):
    prompt: str = "prompt"
    """the column that holds the prompt: a text or a list of chat messages"""
    system_prompt: str | None = None
    """a system message in front of every prompt"""
    chat: bool | None = None
    """put a text prompt into the chat template as the user's message; by default if the model has one"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """passed on to the chat template, e.g. {enable_thinking = false}"""
    max_prompt_length: Count | None = 512
    """the longest prompt, in tokens"""
    on_too_long: Literal["error", "drop", "cut"] = "error"
    """what becomes of a longer prompt: stop with an error, leave it out, or keep its end"""
    shuffle: bool = True
    """a new order of the rows in every epoch, from the run's seed"""


class UsmleSection(Section):
    prompt: Literal["chat", "direct", "completion"] = "chat"
    """how a question is put: reason first and end with "Answer: X"; that line alone; or the first document's wording"""
    reading: Literal["strict", "lenient"] = "strict"
    """what counts as an answer for the reward: the required form only, or what a careful reader would take"""
    reward: Literal["binary", "enhanced", "enhanced_when_right"] = "binary"
    """1 for the right letter; the first document's bonus and penalty on it; or that with its bonus when right only"""
    term_bonus: NotNegative = 0.05
    """enhanced: what medical terminology in an answer is worth"""
    short_penalty: NotNegative = 0.1
    """enhanced: what a very short answer loses"""
    short_length: CountOrNone = 50
    """enhanced: an answer of fewer characters is very short"""
    vocabulary: str | None = None
    """enhanced: a file of medical words, one a line, in place of the packaged one"""
    copies: Count = 1
    """how often each training question is there, from the second time on with its options in another order"""
    bad_rows: Literal["error", "skip"] = "error"
    """what becomes of a row that is no sound question: stop with an error, or leave it out and count it"""


class RewardSection(Section):
    function: str
    """module:function, file.py:function beside the recipe, or a short name"""
    weight: Finite = 1.0
    """its factor in the sum of all rewards"""
    name: str | None = None
    """the name in metrics and records; by default the function's"""
    options: dict[str, Any] = Field(default_factory=dict)
    """what function is called with, where it makes the reward rather than is it"""


class ScoringSection(Section):
    timeout: Positive | None = 60.0
    """seconds that one call of a reward function may take"""
    on_error: Literal["stop", "drop"] = "stop"
    """what a failing reward does: stop the run, or drop the sample and count it"""
    overlong_buffer: CountOrNone = 0
    """soft penalty for answers that come within so many tokens of max_new_tokens (DAPO); 0 is none"""
    overlong_weight: NotNegative = 1.0
    """how much an answer of full length loses by that penalty"""


class SamplingSection(Section):
    samples_per_prompt: Count = 8
    """G: how many answers to each prompt are compared"""
    max_new_tokens: Count = 256
    """the longest answer, in tokens"""
    min_new_tokens: CountOrNone = 0
    """the shortest answer: the end cannot be drawn before"""
    temperature: Positive = 1.0
    """divides the logits, in sampling and in training alike"""
    top_k: CountOrNone | None = None
    """sample among the k likeliest tokens only"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample among the likeliest tokens that together have this probability"""
    min_p: Share | None = None
    """sample among tokens at least this likely, relative to the likeliest"""
    stop: list[str] = Field(default_factory=list)
    """an answer ends with the first of these texts"""
    max_num_seqs: Count | None = None
    """the most answers generated at once"""


class AdvantagesSection(Section):
    scale: Literal["group", "batch", "none"] = "group"
    """divide by the group's standard deviation, by the whole batch's, or not at all"""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """what is subtracted from a reward"""
    eps: NotNegative = 1e-4
    """added to the standard deviation"""
    unbiased: bool = True
    """standard deviation with n − 1 rather than n"""
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """several rewards: normalise their sum, or sum what was normalised each by itself (GDPO)"""
    function: str | None = None
    """an advantage of one's own, module:function(rewards (B, K), groups (B,), weights) -> (B,)"""
    grouping: str = "prompt"
    """who is compared with whom: "prompt", "similarity" ([grouping]), or module:function(batch) -> one label each"""
    shrinkage: NotNegative = 0.0
    """small clusters borrow from the prompt: its mean counts as so many answers of each cluster; 0 borrows nothing"""
    difficulty: Literal["none", "hard", "uncertain"] = "none"
    """let groups weigh more that are seldom right (hard), or right about half the time (uncertain)"""


class GroupingSection(Section):
    embedder: str = "BAAI/bge-m3"
    """what makes vectors of texts: "minilm", "wordllama", a folder of sentence-transformers, or a hub id owner/name"""
    device: str = "auto"
    """where the embedder runs; auto is a CUDA device where there is one, else the CPU"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """what the embedder computes in; auto is bfloat16 on a GPU, else float32"""
    batch_size: Count = 64
    """texts that are embedded at once"""
    cache: CountOrNone = 20_000
    """so many embeddings are kept, by the hash of their text; 0 is none"""
    text_after: str | None = "</think>"
    """only what follows the last such mark is compared, or all where there is none; none compares whole answers"""
    method: Literal["average", "ward_rows", "threshold", "adaptive", "dbscan"] = "average"
    """how answers to one prompt are put into clusters (docs/creative.md)"""
    max_groups: Annotated[int, Field(ge=2)] = 7
    """average, document, adaptive: the most clusters of a prompt; the silhouette, or the largest gap, chooses"""
    min_silhouette: Annotated[float, Field(ge=-1, le=1)] = 0.1
    """average, document, adaptive: with a lower silhouette all answers are one cluster"""
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.7
    """threshold, dbscan: texts are alike above this cosine similarity (dbscan: from it on)"""
    min_samples: Count = 2
    """dbscan: an answer with so many alike, itself included, makes a cluster"""
    levels: Annotated[int, Field(ge=2)] = 2
    """2 is prompt and cluster; each further one cuts clusters into clusters by the same rule"""
    skip_single_members: bool = False
    """compute no reward for an answer that is alone in its cluster: its advantage is 0 anyway"""
    measure: bool = False
    """cluster and measure the diversity also where answers are compared with all others to their prompt"""
    workers: CountOrNone | None = None
    """Ray workers that embed and cluster; 0 is in this process. By default one per GPU, up to 8, where there are two"""
    ray_address: str | None = None
    """the Ray cluster to use; by default one is started on this machine for the run"""
    ray_host: str = "127.0.0.1"
    """the address of a Ray started here; with another than the default it can be reached from other machines"""


class LossSection(Section):
    name: str = "dapo"
    """one of {losses}, or module:function of one's own (one number per token)"""
    policy_coef: NotNegative = 1.0
    """weight of the policy's own loss; 0 leaves it out (with [preference] that is DPO)"""
    ratio: Literal["token", "sequence"] | None = None
    """one ratio per token or per answer; by default the loss's own"""
    clip_low: NotNegative = 0.2
    """ε: the ratio is held above 1 − this"""
    clip_high: NotNegative | None = None
    """ε_high: the ratio is held below 1 + this; by default clip_low (for cispo a ceiling, 5)"""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """a ceiling on the ratio where the advantage is negative"""
    denominator: Literal["completion_mask", "policy_mask"] = "completion_mask"
    """what a mean is divided by: all answers, or only what the masks leave (the first document)"""
    kl_coef: NotNegative = 0.0
    """β: weight of the KL to the reference"""
    kl: Literal["k1", "k2", "k3", "unbiased", "full", "full_ratio_weighted"] = "k3"
    """the KL: an estimate (unbiased is DeepSeek-V3.2's), or over the whole vocabulary (full_ratio_weighted: weighted)"""
    entropy_coef: Finite = 0.0
    """bonus on the entropy of the policy"""
    importance_cap: Positive | None = None
    """correct for a difference between sampler and trainer by their ratio, at most this (TIS)"""


class PreferenceSection(SourcesSection):
    weight: NotNegative = 0.0
    """w₂: weight of the preference term, learning from pairs (docs/preference.md); 0 leaves it out"""
    beta: Positive = 0.1
    """β: the smaller, the further pairs may take the policy from the reference"""
    kind: str | list[str] = "sigmoid"
    """the loss of a pair, or several that are added: {kinds}"""
    kind_weights: list[Finite] | None = None
    """a factor for each kind; by default 1"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """the share of pairs that may be the wrong way round, for the kinds robust, aot, aot_unpaired and exo_pair"""
    discopop_tau: Positive = 0.05
    """discopop: its temperature"""
    pairs: Literal["group", "data", "both"] = "group"
    """where pairs come from: the answers to one prompt, by their rewards; a data set (preference.train); or both"""
    pairs_per_group: Count = 1
    """pairs of one group: the best and the worst, the second best and the second worst, and so on"""
    min_margin: NotNegative = 0.0
    """the rewards of a group's pair must differ by more than this; equal ones make no pair"""
    reward: str | None = None
    """the name of the reward that puts a group in order; by default the weighted sum of all"""
    prompt: str = "prompt"
    """the column that holds the prompt; where there is none, it is what chosen and rejected begin with"""
    chosen: str = "chosen"
    """the column of preference.train that holds the better answer: a text, a message or messages"""
    rejected: str = "rejected"
    """the column that holds the worse answer"""
    batch_size: Count = 16
    """pairs of the data set in a step"""
    max_length: Count | None = 1024
    """the longest pair: tokens of its prompt and the longer answer"""
    on_too_long: Literal["error", "drop", "cut"] = "drop"
    """what becomes of a longer pair: stop with an error, leave it out, or cut the ends of its answers off"""
    shuffle: bool = True
    """a new order of the pairs in every epoch, from the run's seed"""
    cache: bool = True
    """keep the reference's log-probs of the data set's pairs on disk; without it they are computed in each step"""

    @property
    def kinds(self) -> list[str]:
        """The kinds as a list, also where there is one."""
        return [self.kind] if isinstance(self.kind, str) else self.kind


class MasksSection(Section):
    truncated: bool = False
    """answers that were cut off by max_new_tokens do not teach"""
    off_policy: Literal["v3.2", "reference_drift"] | None = None
    """do not learn from answers that have become unlikely (v3.2), or that left the reference behind (document)"""
    off_policy_threshold: Positive = 0.5
    """how far is too far"""
    validity: bool = False
    """answers that are too short, without an answer that can be found, or repetitive do not teach"""
    min_length: CountOrNone = 10
    """validity: the fewest characters"""
    max_repetition: Share = 0.5
    """validity: the largest share of an answer's word triples that were seen before in it"""
    high_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """only this share of tokens, those with the highest entropy, teach"""
    keep_sampling_mask: bool = False
    """renormalise the policy over what top-k, top-p and min-p had left (DeepSeek-V3.2's keep sampling mask)"""


class ReferenceSection(Section):
    refresh_every: CountOrNone = 0
    """every so many steps the reference becomes the policy; 0 is never"""
    mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """at a refresh the reference moves this share of the way to the policy"""


class OptimizerSection(Section):
    learning_rate: NotNegative = 1e-6
    """of AdamW, on float32 master weights"""
    embedding_learning_rate: NotNegative | None = None
    """for the token embeddings; by default the same. Embeddings that are also the head keep the plain one"""
    tied_embedding_rate: bool = False
    """apply embedding_learning_rate even where the embeddings are also the head"""
    weight_decay: NotNegative = 0.0
    """of matrices; norms and biases have none"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """decay of the mean gradient"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """decay of the mean squared gradient"""
    eps: Positive = 1e-8
    """added to the root of the latter"""
    max_grad_norm: Positive | None = 1.0
    """gradients are scaled down to this norm"""
    warmup_steps: CountOrNone = 0
    """steps in which the learning rate rises"""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """how the learning rate falls to its end, after the warm-up"""
    final: Share = 0.0
    """the share of the learning rate that is left at the end"""


class SftSection(Section):
    steps: CountOrNone = 0
    """supervised steps on the task's examples before the first GRPO step, to teach the answer's format"""
    epochs: Positive | None = None
    """passes over the examples, each in a new order; if given, it decides rather than steps"""
    batch_size: Count = 32
    """examples in a step"""
    learning_rate: Positive = 1e-3
    """of AdamW"""


class TrainSection(Section):
    steps: CountOrNone | None = None
    """how many steps; if given, it decides rather than epochs. 0 is the supervised warm-up alone"""
    epochs: Positive | None = 3.0
    """how often every row is used"""
    batch_size: Count = 4
    """prompts in a part of the batch"""
    accumulation: Count = 4
    """parts in a step, whose gradients add up: a step has batch_size × accumulation prompts"""
    iterations: Count = 1
    """μ: how often a batch is used"""
    mini_batches: Count = 1
    """updates in one pass over a batch; each is normalised by itself"""
    token_budget: Count | None = None
    """tokens of one forward and backward pass; by default what fits. It does not change the result"""
    resample_rounds: CountOrNone = 0
    """how many further rounds of prompts may be sampled to replace those that teach nothing"""
    skip_equal_rewards: bool = True
    """compute nothing for groups with equal rewards, unless a KL or entropy term needs them"""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """a loss or gradient that is no finite number: stop before the weights move, or skip the update and count it"""
    max_logp_mismatch: Positive = 0.05
    """warn when sampler and trainer differ by more than this in a token's log-prob, on average"""
    log_term_gradients_every: CountOrNone = 0
    """every so many steps, also report each objective term's gradient norm and the cosines between them"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """decides the order of rows, the sampling and an adapter's first values"""


class EvaluateSection(Section):
    every: CountOrNone = 0
    """evaluate on the held-out rows every so many steps; 0 is only at the end"""
    before_training: bool = True
    """also before the first step"""
    samples: Count = 1
    """answers to each row, averaged"""
    temperature: NotNegative = 0.0
    """of those answers; 0 takes the likeliest token"""
    max_new_tokens: Count | None = None
    """the longest answer; by default as in training"""
    metric: str | None = None
    """which metric chooses the best checkpoint; by default the task's"""
    patience: Count | None = None
    """stop after so many evaluations without a better one"""


class RunSection(Section):
    folder: str | None = None
    """where the run is kept; by default a new folder below runs/"""
    name: str | None = None
    """part of the new folder's name; by default the recipe's"""
    log_every: Count = 1
    """steps between two lines where there is no terminal to draw on; metrics.jsonl has every step"""
    checkpoint_every: CountOrNone = 50
    """steps between checkpoints; 0 is only at the end"""
    keep_checkpoints: Count = 2
    """how many checkpoints are kept, beside the best"""
    resumable: bool = True
    """checkpoints hold masters and optimizer (16 bytes a weight); false keeps the policy alone: no --resume"""
    save_rollouts: bool = True
    """one Parquet file of prompts, answers and rewards per step"""
    tensorboard: bool = True
    """TensorBoard events, where the package is installed"""
    wandb: str | None = None
    """the Weights & Biases project to report to"""
    picture: bool = True
    """a picture of the curves at the end"""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """precision of the saved model; by default what it computes in"""
    push_to: str | None = None
    """the hub repository, owner/name, that the finished model is pushed to"""


class Recipe(Section):
    """A whole run."""

    task: str = "rows"
    """"rows" (your data and rewards), "quiz", "gsm8k", "usmle", or module:function that returns a Task"""
    algorithm: str = "dapo"
    """the preset below everything else: {algorithms}"""
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    usmle: UsmleSection = Field(default_factory=UsmleSection)
    rewards: list[RewardSection] = Field(default_factory=list)
    """[[rewards]]: added to the task's own"""
    scoring: ScoringSection = Field(default_factory=ScoringSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    advantages: AdvantagesSection = Field(default_factory=AdvantagesSection)
    grouping: GroupingSection = Field(default_factory=GroupingSection)
    loss: LossSection = Field(default_factory=LossSection)
    preference: PreferenceSection = Field(default_factory=PreferenceSection)
    masks: MasksSection = Field(default_factory=MasksSection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    sft: SftSection = Field(default_factory=SftSection)
    train: TrainSection = Field(default_factory=TrainSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    run: RunSection = Field(default_factory=RunSection)
    phases: list[dict[str, Any]] = Field(default_factory=list)
    """[[phases]]: settings for a number of steps or tokens, one phase after another"""
    ramps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """[ramps]: a setting that moves between points"""
    rules: list[dict[str, Any]] = Field(default_factory=list)
    """[[rules]]: a setting that changes when a metric does"""

    def get(self, name: str) -> Any:
        """The value of a dotted setting; None in a section that is off."""
        value: Any = self
        for part in name.split("."):
            value = None if value is None else getattr(value, part)
        return value

    def with_settings(self, values: Mapping[str, Any]) -> Recipe:
        """A recipe in which these dotted settings have other values, checked like all others."""
        from groupwise.config.layers import make_recipe, nested  # they make recipes, and so know this class

        return make_recipe(nested(values), base=self.model_dump())


def _fill(model: type[Section], **lists: Sequence[str]) -> None:
    """Put the names that exist into the descriptions."""
    for field in model.model_fields.values():
        for name, values in lists.items():
            if field.description:
                field.description = field.description.replace(f"{{{name}}}", ", ".join(values))


_fill(LossSection, losses=tuple(LOSSES))
_fill(PreferenceSection, kinds=tuple(KINDS))
_fill(Recipe, algorithms=tuple(ALGORITHMS))

# The choices that are written out above, for the checker of types, are the core's own; a test holds them together.
CHOICES: dict[str, tuple[str, ...]] = {
    "advantages.scale": SCALES,
    "advantages.baseline": BASELINES,
    "advantages.combine": COMBINATIONS,
    "loss.kl": KL_FORMS,
    "loss.ratio": RATIOS,
    "loss.denominator": DENOMINATORS,
    "masks.off_policy": OFF_POLICY_RULES,
}

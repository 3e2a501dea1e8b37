"""A config class of the script's own, read from YAML with TRL's parser beside TRL's own classes, as in Open R1."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml
from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import think_format_reward


@dataclass
class OwnConfig(GRPOConfig):
    system_prompt: str | None = field(default=None, metadata={"help": "the first message of every conversation"})
    benchmarks: list[str] = field(default_factory=list, metadata={"help": "what to evaluate on later"})


def length(completions, **kwargs):
    return [-0.01 * len(completion[0]["content"]) for completion in completions]


VALUES = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "openai/gsm8k",
    "system_prompt": "Think first.",
    "benchmarks": ["math_500", "aime24"],
    "use_peft": True,
    "lora_target_modules": ["q_proj", "v_proj"],
    "optim": "paged_adamw_8bit",
    "output_dir": "own",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 3,
    "logging_steps": 1,
    "steps_per_generation": 2,  # the last checkpoint is between two updates of a rollout
    "learning_rate": 1.0e-5,
    "bf16": False,
}
Path("own.yaml").write_text(yaml.safe_dump(VALUES))
parser = TrlParser((ScriptArguments, OwnConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config(["--config", "own.yaml", "--use_cpu"])
training_args.model_init_kwargs = {
    "revision": model_args.model_revision,
    "attn_implementation": model_args.attn_implementation,
    "dtype": model_args.dtype,
    "device_map": None,
    "quantization_config": get_quantization_config(model_args),
}


def conversation(row):
    messages = [{"role": "system", "content": training_args.system_prompt}]
    return {"prompt": [*messages, {"role": "user", "content": row["question"]}]}


trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    reward_funcs=[think_format_reward, length],
    args=training_args,
    train_dataset=load_dataset(script_args.dataset_name, split=script_args.dataset_train_split).map(conversation),
    peft_config=get_peft_config(model_args),
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
trainer.accelerator.print(f"{trainer.get_num_trainable_parameters()} trained, pushed to {trainer.hub_model_id}")
trainer.end()

"""Arguments from the command line, with transformers' parser and dataclasses of the script."""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="trl-lib/tldr", metadata={"help": "the data set"})
    model_name_or_path: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "the model"})


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


COMMAND = """
    --output_dir parsed --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 6 --max_steps 2
    --logging_steps 1 --bf16 False --learning_rate 1e-4 --loss_type bnpo --save_strategy no
"""
script_args, training_args = HfArgumentParser((ScriptArguments, GRPOConfig)).parse_args_into_dataclasses(
    COMMAND.split()
)
trainer = GRPOTrainer(
    model=script_args.model_name_or_path,
    reward_funcs=letters,
    args=training_args,
    train_dataset=load_dataset(script_args.dataset_name, split="train"),
)
trainer.train()
trainer.save_model(training_args.output_dir)
trainer.create_model_card(dataset_name=script_args.dataset_name)
trainer.accelerator.print("saved")

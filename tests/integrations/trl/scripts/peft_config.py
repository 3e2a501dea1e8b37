"""A LoRA adapter, saved and loaded again with PEFT."""

from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from trl import GRPOConfig, GRPOTrainer


def letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir="lora",
        learning_rate=1e-3,
        beta=0.04,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.model.print_trainable_parameters()
trainer.train()
trainer.save_model("lora/final")
loaded = AutoPeftModelForCausalLM.from_pretrained("lora/final")

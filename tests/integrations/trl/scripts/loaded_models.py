"""Policy and reward model are loaded by the script, with their tokenizers."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B", padding_side="left")
reward = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
trainer = GRPOTrainer(
    model=model,
    reward_funcs=AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1),
    args=GRPOConfig(
        output_dir="loaded",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        bf16=False,
    ),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    processing_class=tokenizer,
    reward_processing_classes=AutoTokenizer.from_pretrained(reward),
)
trainer.train()

"""TRL's `GRPOTrainer` and `GRPOConfig` as a translation to a recipe and the one trainer. TRL itself is not needed."""

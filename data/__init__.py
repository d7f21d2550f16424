"""From prompts to training batches."""

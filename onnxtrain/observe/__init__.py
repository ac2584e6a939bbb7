"""What users see of a training run: logs, times, memory, statistics of activations."""

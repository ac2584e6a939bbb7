"""Observability of a training run: logs, timings, memory, activation statistics."""

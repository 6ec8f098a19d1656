"""Rescalable streaming data: the same global batches on any number of ranks, workers and micro-batches."""

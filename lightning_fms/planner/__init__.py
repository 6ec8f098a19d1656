"""Predicts memory, time and cost of a run before it is started. Nothing here imports another piece."""

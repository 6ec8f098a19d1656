"""FSDP2 and `torch.compile` for any plain module, with checkpoints that load on any number of ranks."""

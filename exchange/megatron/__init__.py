"""Megatron-core's distributed checkpoints (`torch_dist`) of the same models, both ways."""

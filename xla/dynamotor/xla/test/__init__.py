"""Helpers of torch_xla's own training programs."""

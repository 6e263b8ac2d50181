"""Names of torch_xla's own parts that programs and its tests import."""

"""XLA for PyTorch: the lazy `xla` device, the bridge from captured graphs, and the API that users of torch_xla know."""

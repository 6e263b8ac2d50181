"""Several replicas: starting them, feeding them, PyTorch's `torch.distributed` over XLA, and SPMD."""

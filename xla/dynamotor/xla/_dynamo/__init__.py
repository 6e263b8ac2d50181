"""What torch_xla keeps for torch.compile; the bridge is `bridge.py`."""

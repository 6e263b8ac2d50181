"""Data-parallel training: gradients are reduced inside the compiled backward, or the graph is cut at DDP's buckets."""

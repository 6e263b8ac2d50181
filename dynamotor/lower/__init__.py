"""From aten graphs to programs of fused loop kernels and aten calls."""

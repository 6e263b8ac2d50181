"""What compiled programs stand on while they run: building and loading libraries, launching kernels, memory,
CUDA graphs.
"""

"""On sys.path after `install_as_torch_xla()`: holds the one package that a spawned process finds as
`torch_xla`.
"""

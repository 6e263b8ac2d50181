"""Found as `torch_xla` by processes that a program with the alias spawned: installs the alias, which replaces
this module.
"""

from dynamotor.xla.install import install_as_torch_xla

install_as_torch_xla()

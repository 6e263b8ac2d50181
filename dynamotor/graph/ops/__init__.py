"""Definitions of ops, one module per family: shapes, requirements on sizes, layouts, sizes from data,
padding, checks. Lowerings (`lower/ops_<family>.py`) and XLA lowerings use the same family names.
"""

from . import (  # noqa: F401  (each adds its definitions)
    attention,
    conv,
    create,
    fft,
    index,
    linalg,
    loss,
    nested,
    norm,
    pointwise,
    pool,
    random,
    reduce,
    scatter,
    upsample,
    view,
)

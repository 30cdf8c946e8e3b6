"""Types of the flat vectors that every floor passes on."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
"""float32 of any shape; one-dimensional unless said otherwise."""

"""Triton kernels, imported at the first use of the backend. One module per op, named as the op.

Set TRITON_INTERPRET=1 before anything imports triton to run them on CPU tensors, slowly, in Triton's interpreter.
"""

import triton
import triton.language.standard
from triton.runtime.interpreter import InterpretedFunction

# Triton decides at each decorator. Its own functions were decorated when it was imported: they must have been as well.
INTERPRETED = bool(triton.knobs.runtime.interpret) and isinstance(triton.language.standard.cdiv, InterpretedFunction)

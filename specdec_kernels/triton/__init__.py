"""Triton kernels, imported at the first use of the backend. One module per op, named as the op.

Set TRITON_INTERPRET=1 before that to run them on CPU tensors, slowly, in Triton's interpreter.
"""

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)

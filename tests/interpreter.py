"""Triton's interpreter, made fast enough for a test suite."""

import dataclasses
import functools
import warnings


@functools.cache
def speed_up() -> None:
    """Patches `triton.language` once per module instead of at every call of a device function, which is half of the time
    that the interpreter takes. A kernel's own launch patches what its functions use, before they run."""
    from triton.runtime import interpreter

    seen = set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in seen:
            seen.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    real, known = interpreter._get_np_dtype, {}

    def numpy_dtype(ty):
        name = ty.scalar.name if not ty.scalar.is_ptr() else "pointer"
        if name not in known:
            known[name] = real(ty)
        return known[name]

    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    # Checks of integer overflow by 64-bit doubles of every addition, which the noise means to have.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # Infinities meet in the kernels on purpose; the interpreter does it with numpy, which warns.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")

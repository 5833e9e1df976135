"""Compiles the Triton kernels for GPUs that are not there.

The ops run as they are, on CPU tensors, with a driver that names the wanted architecture; each launch stops after its
compilation. So what is compiled is what a GPU would be given: the same signatures, specialisations and options. Must run in
a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget


class _Driver:
    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # kernels are cached by device

    def get_current_stream(self, device=None):
        return 0


@contextlib.contextmanager
def compiling(arch: int):
    """Inside, launches compile for sm_`arch` and append their kernels to the list that is yielded."""
    from triton.runtime.jit import JITFunction

    compiled = []
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(arch))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver.set_active(before)


class Usage(NamedTuple):
    registers: int
    spills: int
    """bytes of local memory"""
    shared: int
    """bytes of shared memory"""
    wide_loads: int
    """128-bit global loads in the PTX"""


def usage(kernel) -> Usage:
    """What a compiled kernel asks of its multiprocessor, from its binary and PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    wide = re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v8\.b16|ld\.global\S*\.v2\.b64", kernel.asm["ptx"])
    return Usage(int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"]), kernel.metadata.shared, len(wide))

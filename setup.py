"""Builds the CPU kernels as one stable-ABI, abi3 extension.

SPECDEC_BUILD_CPU=0 (or no C++ compiler) installs the package pure-Python; `python -m specdec_kernels info` then says so.
The rest of the metadata is in pyproject.toml.
"""

import os
import shutil
import sys

from setuptools import setup

# The oracle is installed under a name that cannot collide with another project's python_ref; tests and bench stay out.
PACKAGES = [
    "specdec_kernels",
    "specdec_kernels.decoding",
    "specdec_kernels.decoding.drafters",
    "specdec_kernels.demo",
    "specdec_kernels.eager",
    "specdec_kernels.training",
    "specdec_kernels.triton",
    "specdec_kernels_ref",
]
TORCH_TARGET = "0x020b000000000000"  # libtorch 2.11: the oldest release whose stable ABI the sources use
CPU_SOURCES = [
    "build_tree",
    "filter_probs",
    "isa_avx2",
    "isa_avx512",
    "isa_baseline",
    "kv_append_slots",
    "kv_evict",
    "kv_rollback",
    "kv_compact",
    "kv_copy_pages",
    "kv_scrub",
    "library",
    "markov_step",
    "nucleus",
    "sample",
    "schedule_lengths",
    "state_select",
    "verify_chain",
    "verify_tree",
]


def compiler_found() -> bool:
    return bool(shutil.which(os.environ.get("CXX", "").split(" ")[0] or "c++") or shutil.which("g++"))


def cpu_extension():
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        "specdec_kernels._cpu",
        [f"csrc/cpu/{name}.cpp" for name in CPU_SOURCES],
        include_dirs=[os.path.abspath("csrc")],
        py_limited_api=True,
        extra_compile_args={
            "cxx": [
                "-O3",
                "-g0",
                "-std=c++17",
                "-fvisibility=hidden",
                # Every backend and instruction set must produce the same bits: no fused multiply-add, no reassociation.
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wall",
                # GCC 12 warns about the deliberately undefined operands of its own AVX-512 intrinsics.
                "-Wno-maybe-uninitialized",
                "-Wno-psabi",
                f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
            ]
        },
    )


def extensions():
    wanted = os.environ.get("SPECDEC_BUILD_CPU", "auto")
    if wanted == "0":
        print("specdec_kernels: SPECDEC_BUILD_CPU=0, installing without native kernels", file=sys.stderr)
        return {}
    if wanted != "1" and not compiler_found():
        print("specdec_kernels: no C++ compiler found, installing without native kernels", file=sys.stderr)
        return {}
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """A compiler that cannot compile leaves a pure-Python installation, unless SPECDEC_BUILD_CPU=1 asks to fail."""

        def run(self):
            try:
                super().run()
            except Exception as error:
                if wanted == "1":
                    raise
                print(f"specdec_kernels: building failed, installing without native kernels: {error}", file=sys.stderr)
                self.extensions = []

    return {
        "ext_modules": [cpu_extension()],
        "cmdclass": {"build_ext": Build.with_options(no_python_abi_suffix=True)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=PACKAGES,
    package_dir={"specdec_kernels_ref": "python_ref"},
    package_data={"specdec_kernels.demo": ["trained/*/*"]},
    **extensions(),
)

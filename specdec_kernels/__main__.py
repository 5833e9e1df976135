"""`python -m specdec_kernels info`: versions, backends and why one is missing. `demo` runs the demonstration,
`train` trains drafters."""

import json
import sys


def main(argv: list[str]) -> int:
    command = argv[0] if argv else "info"
    if command == "info":
        from . import info

        print(json.dumps(info(), indent=2))
        return 0
    if command == "demo":
        from .demo.__main__ import main as demo

        return demo(argv[1:])
    if command == "train":
        from .training.cli import main as train

        return train(argv[1:])
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    print(f"usage: python -m specdec_kernels [info|demo|train], got {command!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

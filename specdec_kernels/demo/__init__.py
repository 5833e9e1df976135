"""The demo: a small real model decoding through the package (`python -m specdec_kernels.demo`)."""

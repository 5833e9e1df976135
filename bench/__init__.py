"""Microbenchmarks: `python -m bench [op ...]`. See README.md beside this file."""

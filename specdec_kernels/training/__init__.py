"""Training of drafters: texts, the target's hidden states, losses (`python -m specdec_kernels train`)."""

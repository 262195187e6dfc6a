"""`python -m flux_ops bench`: the ops against the plain sequence and PyTorch's, and studies of one knob."""

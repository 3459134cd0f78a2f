"""Streaming wrappers around the model's modules.

Each is a stage with a state that is a value: made by `init_state`, passed to `step`, reset, measured in bytes.
What a stage streams equals what the same module computes offline over the whole input.
"""

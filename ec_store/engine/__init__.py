"""What an engine needs beside a store, without vLLM: fetches, writes, and copies of tensors.

`region`, `slots`, `tensors` and `threads` need only PyTorch: `tests/gpu` runs them on machines that
have no other dependency of this package.
"""

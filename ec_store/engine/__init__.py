"""What an engine needs beside a store, without vLLM: fetches, writes, and copies of tensors.

`region` and `tensors` import torch, numpy and `ec_store.memory_left`, and no other module of this
package: `tests/gpu` runs them on machines with PyTorch alone.
"""

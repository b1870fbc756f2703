"""Last import of the process that engines are forked from: work that each engine would repeat."""

import atexit
import gc

from torch._inductor import codecache, cpu_vec_isa

# PyTorch compiles and loads a test program for each instruction set, and keeps the result.
cpu_vec_isa.pick_vec_isa()

# It hashes its own source files and Triton's for the names of compiled code, and keeps the hashes.
codecache.torch_key()
codecache.CacheBase.get_system()

# vLLM collects garbage several times while an engine starts. Each collection would traverse all
# imported objects, and copy the memory that engines share with the process they are forked from.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries report objects that remain at exit as leaks

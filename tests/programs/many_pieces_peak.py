"""Prints by how many bytes one call on a checkpoint in many pieces raises the peak of memory."""

import contextlib
import io
import sys
from pathlib import Path

import jax
import peak_memory
from many_pieces import tensors_of_experts, write

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

jax.devices()


def run(folder, doing):
    options = {"fsync": False, "memory_budget_bytes": 64 << 20}
    if doing == "plan":
        with contextlib.redirect_stdout(io.StringIO()):
            main(["plan", folder, "--mesh", "x=64", "--hosts", "64", "-q"])
    elif doing == "consolidate":
        target = f"{folder}-consolidated"
        osl.consolidate(folder, target, options=osl.WriteOptions(**options))
    elif doing == "convert":
        budget = options["memory_budget_bytes"]
        options = osl.ConvertOptions(memory_budget_bytes=budget)
        osl.convert(folder, f"{folder}-converted", format="hf", options=options)
    else:
        osl.load(folder)


folder, doing = sys.argv[1:]
warm = Path(f"{folder}-warm")
write(warm, tensors_of_experts(1, 2), 2)
run(str(warm), doing)
peak_memory.reset()
before = peak_memory.peak_bytes()
run(folder, doing)
print(peak_memory.peak_bytes() - before)

import sys

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

import orbax_safetensors_layout as osl

tree = {"w": np.arange(4)}
with osl.context("pytree"):
    for name, save in {"a": ocp.save, "b": ocp.save_async}.items():
        try:
            save(f"{sys.argv[1]}/{name}", tree)
        except osl.SafetensorsLayoutError:
            print("refused")

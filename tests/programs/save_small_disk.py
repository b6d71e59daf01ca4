import os
import sys

import numpy as np

import orbax_safetensors_layout as osl

folder = sys.argv[1] + "/x"
old = {"t": np.arange(100_000.0)}
osl.save(folder, old)
try:
    osl.save(folder, {"t": np.ones(300_000)}, overwrite=True)
except osl.StorageError as error:
    message = str(error)
assert "No space left" in message
assert "Free space" in message
assert os.listdir(sys.argv[1]) == ["x"]
assert (osl.load(folder)["t"] == old["t"]).all()
osl.save(folder, {"t": np.ones(10)}, overwrite=True)
print("refused")

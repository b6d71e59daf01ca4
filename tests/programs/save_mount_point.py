import os
import sys

import numpy as np

import orbax_safetensors_layout as osl

seen = []
try:
    osl.save(sys.argv[1], {"t": np.ones(3)}, options=osl.WriteOptions(progress=seen.append))
    print("saved", os.listdir(sys.argv[1] + "/.."))
except osl.SafetensorsLayoutError:
    print("refused" if not seen else "failed", os.listdir(sys.argv[1] + "/.."))

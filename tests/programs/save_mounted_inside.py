import contextlib
import os
import sys

import numpy as np

import orbax_safetensors_layout as osl

mounted = os.open(sys.argv[1] + "/data", os.O_RDONLY)
open(sys.argv[1] + "/data/precious", "w").close()
with contextlib.suppress(osl.SafetensorsLayoutError):
    osl.save(sys.argv[1], {"t": np.ones(3)})
print(os.listdir(mounted))

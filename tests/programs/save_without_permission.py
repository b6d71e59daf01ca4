import os
import sys
import tempfile

import numpy as np

import orbax_safetensors_layout as osl

with tempfile.TemporaryDirectory() as warm:
    osl.save(warm, {"t": np.ones(3)})
if os.geteuid() == 0:
    os.seteuid(65534)
for folder in ("/x", "/new"):
    message = ""
    try:
        osl.save(sys.argv[1] + folder, {"t": np.ones(3)}, overwrite=True)
    except osl.StorageError as error:
        message = str(error)
    assert "Permission denied" in message
    print("refused", os.listdir(sys.argv[1]))

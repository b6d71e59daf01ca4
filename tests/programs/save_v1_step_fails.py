import os
import sys
import time

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

import orbax_safetensors_layout as osl

mkdir = os.mkdir


def slow(path, *args, **kwargs):
    time.sleep(1 if "orbax-checkpoint-tmp" in os.fspath(path) else 0)
    mkdir(path, *args, **kwargs)


os.mkdir = slow
context = osl.context("state")
if sys.argv[2] == "True":
    context = ocp.Context(checkpoint_layout=osl.SafetensorsLayout)
training = ocp.training.Checkpointer(sys.argv[1], context=context)
try:
    training.save(0, {"w": np.arange(4), "bad": b"bytes"})
except osl.UnsupportedDtypeError:
    print("refused", flush=True)

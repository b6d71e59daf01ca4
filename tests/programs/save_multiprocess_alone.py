import errno
import os
import time
from unittest import mock

import jax
from cluster_trees import make_tree

import orbax_safetensors_layout as osl


def main(path, target, kind, process):
    tree = make_tree(path, "replicated")
    osl.save(target, tree, options=osl.WriteOptions(layout="sharded"))
    real = os.open

    def broken(file, *arguments, **keywords):
        if str(file).endswith((".json", ".safetensors")):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, *arguments, **keywords)

    begin = time.monotonic()
    try:
        with mock.patch.object(os, "open", broken if jax.process_index() == process else real):
            if kind == "consolidate":
                osl.consolidate(target)
            else:
                osl.convert(target, target + "-converted", format="hf")
    except osl.SafetensorsLayoutError as error:
        return type(error).__name__, str(error), time.monotonic() - begin

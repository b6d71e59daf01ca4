import time

import jax
import numpy as np
from cluster_trees import make_tree

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage.local_commit import FolderExchange
from orbax_safetensors_layout.storage.local_write import LocalFileWriter


def main(path, target, doing, process):
    tree = make_tree(path, "dim0")
    osl.save(target, {"old": np.arange(3)})
    if jax.process_index() == process:

        def broken(self, *args):
            raise OSError(5, f"the disk broke while {doing}")

        if doing == "planning":
            tree["bad"] = object()
        elif doing == "commit":
            FolderExchange.commit = broken
        else:
            setattr(LocalFileWriter, doing, broken)
    begin = time.monotonic()
    try:
        osl.save(target, tree, overwrite=True, options=osl.WriteOptions(max_file_bytes=200_000))
    except Exception as error:
        caught = [type(error).__name__, str(error)]
    else:
        caught = None
    seconds = time.monotonic() - begin
    return {"error": caught, "seconds": seconds, "old": osl.load(target)["old"].tolist()}

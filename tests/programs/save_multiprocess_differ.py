import jax
import numpy as np
from cluster_trees import make_tree

import orbax_safetensors_layout as osl


def main(path, target, kind):
    tree = make_tree(path, "dim0")
    osl.save(target, {"old": np.arange(3)})
    if kind == "local":
        tree["count"] = jax.numpy.asarray(7)
    elif jax.process_index() == 1:
        tree.pop("odd")
    try:
        osl.save(target, tree, overwrite=True, options=osl.WriteOptions(max_file_bytes=200_000))
    except osl.PeerError as error:
        text = str(error)
    else:
        text = None
    return {"error": text, "old": osl.load(target)["old"].tolist()}

import jax
import numpy as np
import orbax.checkpoint as ocp
from cluster_trees import make_tree

import orbax_safetensors_layout as osl


def main(path, target, kind):
    tree = make_tree(path, "dim0")
    osl.save(target, {"old": np.arange(3)})
    if kind == "local":
        tree["count"] = jax.numpy.asarray(7)
    elif kind == "tree" and jax.process_index() == 1:
        tree.pop("odd")
    mapping = None
    if kind == "mapping":
        scale = 2.0 + jax.process_index()
        mapping = osl.Mapping(
            [osl.rule("head", osl.tensor("head").scale(scale, lossy_inverse=True))]
        )
        tree = {"head": next(iter(tree.values())).astype(np.float32)}
    options = osl.WriteOptions(max_file_bytes=200_000)
    try:
        osl.save(target, tree, mapping=mapping, overwrite=True, options=options)
    except osl.PeerError as error:
        text = str(error)
    else:
        text = None
    in_background = None
    if kind == "local":
        with ocp.AsyncCheckpointer(osl.SafetensorsLayout()) as checkpointer:
            checkpointer.save(f"{target}-step", tree)
            try:
                checkpointer.wait_until_finished()
            except osl.PeerError as error:
                in_background = str(error)
    return {"error": text, "in_background": in_background, "old": osl.load(target)["old"].tolist()}

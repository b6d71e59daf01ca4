import orbax.checkpoint.experimental.v1 as ocp
from cluster_trees import is_same, tree_of

import orbax_safetensors_layout as osl


def main(root, route):
    if route == "layout":
        osl.install()
        context = ocp.Context()
        context.checkpoint_layout = "safetensors"
    else:
        context = osl.context("state")
    with context, osl.using(write=osl.WriteOptions(max_file_bytes=100_000)):
        ocp.save(root + "/one", tree_of(1))
        ocp.save_async(root + "/two", tree_of(2)).result()
        loaded = [is_same(ocp.load(root + "/one"), tree_of(1))]
        loaded.append(is_same(ocp.load(root + "/two", tree_of(2)), tree_of(2)))
        with ocp.training.Checkpointer(root + "/training", context=context) as training:
            training.save(0, tree_of(0), metrics={"loss": 1.0})
            training.save(1, tree_of(1), metrics={"loss": 0.5})
            loaded.append(is_same(training.load(), tree_of(1)))
    return loaded

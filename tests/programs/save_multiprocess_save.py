import os

import jax
from cluster_trees import make_tree, same_shards
from monitoring import reported

import orbax_safetensors_layout as osl


def main(path, target, split, layout, max_file_bytes):
    tree = make_tree(path, split)
    written = reported("bytes_written")
    options = osl.WriteOptions(layout=layout, max_file_bytes=max_file_bytes)
    osl.save(target, tree, options=options)
    loaded = osl.load(target, dict(tree))
    arrays = [name for name, value in tree.items() if isinstance(value, jax.Array)]
    ranges = osl.plan_load(target, dict(tree)).ranges()
    return {
        "written": written,
        "planned": osl.plan_save(tree, options=options).cost().written_bytes,
        "same": all(same_shards(tree[name], loaded[name]) for name in arrays),
        "step": loaded["step"],
        "files": sorted({os.path.basename(file) for file, _, _ in ranges}),
    }

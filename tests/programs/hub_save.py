import os
import tempfile

import huggingface_hub.constants
import numpy as np
from cluster_trees import array_of
from huggingface_hub import HfApi
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl


def main(endpoint, token, temporary, path):
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": token}
    huggingface_hub.constants.HF_HUB_DISABLE_XET = True
    huggingface_hub.constants.ENDPOINT = endpoint
    tempfile.tempdir = temporary
    sent = []
    upload = HfApi.preupload_lfs_files

    def counted(self, *arguments, additions, **options):
        sent.extend(addition for addition in additions if not addition._is_uploaded)
        return upload(self, *arguments, additions=additions, **options)

    HfApi.preupload_lfs_files = counted
    mesh = mesh_of(x=2, y=2)
    value = np.arange(64.0).reshape(8, 8)
    specs = [P("x"), P(None, "x"), P("y", "x")]
    tree = {f"w{n}": array_of(value, mesh, specs[n % 3]) for n in range(6)}
    osl.save(path, tree, options=osl.WriteOptions(max_file_bytes=600, timeout_seconds=60))
    return len({a.path_in_repo for a in sent if a.path_in_repo.endswith(".safetensors")})

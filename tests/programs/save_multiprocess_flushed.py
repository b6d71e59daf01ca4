import os

from cluster_trees import make_tree

import orbax_safetensors_layout as osl


def main(path, target):
    flushed, real = [], os.fsync

    def fsync(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    os.fsync = fsync
    osl.save(target, make_tree(path, "dim0"), options=osl.WriteOptions(max_file_bytes=200_000))
    return flushed

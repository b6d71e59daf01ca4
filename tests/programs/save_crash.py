import os

import numpy as np
from checkpoints import layers_of
from fork_server import kill_at, say

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.save
from orbax_safetensors_layout.storage import local_commit


def tensors(version, files, rows):
    return layers_of(version, files, rows) | {"odd": np.full(version + 3, version, np.int8)}


def main(folder, version, files, rows, kill, exchange):
    rename = local_commit._renameat2() if exchange else None  # which is not Python's, but counts
    local_commit._renameat2 = lambda: rename and (lambda *arguments: os.renameat2(*arguments))
    os.renameat2 = rename
    count = kill_at(kill, [(os, "renameat2")] if rename else [])
    options = osl.WriteOptions(max_file_bytes=242 * rows)
    say("begin")
    osl.save(folder, tensors(version, files, rows), options=options, overwrite=True)
    say(count[0])

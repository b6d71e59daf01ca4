import os

from checkpoints import layers_of
from fork_server import kill_at, say

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.conversion.consolidate
import orbax_safetensors_layout.convert
from orbax_safetensors_layout.storage import local_commit


def main(what, source, target, version, kill, exchange):
    rename = local_commit._renameat2() if exchange else None  # which is not Python's, but counts
    local_commit._renameat2 = lambda: rename and (lambda *arguments: os.renameat2(*arguments))
    os.renameat2 = rename
    count = kill_at(kill, [(os, "renameat2")] if rename else [])
    say("begin")
    small = osl.WriteOptions(max_file_bytes=12100)
    if what == "save":
        osl.save(target, layers_of(version), options=small, overwrite=True)
    elif what == "save in pieces":
        osl.save(
            target, layers_of(version), options=osl.WriteOptions(layout="sharded"), overwrite=True
        )
    elif what == "consolidate":
        osl.consolidate(target, options=small)
    else:
        options = osl.ConvertOptions(max_file_bytes=12100)
        form = what.partition(" ")[2]
        osl.convert(source, target, format=form, overwrite=version > 1, options=options)
    say(count[0])

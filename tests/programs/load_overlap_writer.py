import sys
import time

sys.path[:0] = [sys.argv[1]]
import test_load_overlap as t  # noqa: E402

import orbax_safetensors_layout as osl  # noqa: E402
from orbax_safetensors_layout.storage import local_commit  # noqa: E402

if sys.argv[3] == "renames":
    local_commit._renameat2 = lambda: None
print("begun", flush=True)
deadline = time.monotonic() + float(sys.argv[4])
version = 1
while time.monotonic() < deadline:
    version += 1
    layout = "hf" if version % 3 else "sharded"
    osl.save(sys.argv[2], t.tree_of(version), options=t.WRITERS[layout], overwrite=True)
print(version, flush=True)

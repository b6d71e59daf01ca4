import contextlib
import os
import signal
import time

import numpy as np

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import local_commit


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(*files):
    while not any(map(os.path.exists, files)):
        time.sleep(0.01)


def main(folder, what, value=3.0, gate=None, after=None):
    def save(value, **options):
        tree = {f"t{n}": np.full(300_000, value, np.float32) for n in range(4)}
        options = osl.WriteOptions(fsync=False, concurrency=1, max_file_bytes=1_300_000, **options)
        osl.save(folder, tree, options=options, overwrite=True)

    if what == "die while writing":
        save(1.0)
        save(2.0, progress=die)
    elif what.startswith("die at rename"):
        local_commit._renameat2 = lambda: None
        save(1.0)
        open(folder + "/config.json", "w").close()
        rename, calls = os.rename, []

        def one_is_fatal(*arguments, **keywords):
            calls.append(arguments)
            if len(calls) == int(what.split()[-1]):
                die()
            rename(*arguments, **keywords)

        os.rename = one_is_fatal
        save(2.0)
    elif what == "save":
        local_commit._renameat2 = lambda: None
        try:
            save(value)
        except osl.SafetensorsLayoutError as error:
            return f"{type(error).__name__}: {error}"
        return "saved"
    else:
        return meet(save, value, gate, after)


def meet(save, value, gate, after):
    """Save, beside another process that does; each waits until both have begun to write."""
    if after:
        wait_for(f"{after}.reached", f"{after}.ended")

    def reached(_):
        open(f"{gate}.reached", "w").close()
        if not after:
            wait_for(f"{gate[:-1]}2.reached", f"{gate[:-1]}2.ended")
        else:
            wait_for(f"{after}.ended")

    try:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: open(f"{gate}.ended", "w").close())
            save(value, progress=reached)
    except osl.SafetensorsLayoutError:
        return "failed"
    return "saved"

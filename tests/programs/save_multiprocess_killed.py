import time

import jax
from cluster_trees import make_tree
from kills import die

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.runtime import heartbeat
from orbax_safetensors_layout.save import PreparedSave
from orbax_safetensors_layout.storage import ResumableFile
from orbax_safetensors_layout.storage.local_write import LocalFileWriter


def main(path, target, kind, process):
    heartbeat.SILENCE_SECONDS = 5.0
    tree = make_tree(path, "replicated")
    osl.save(target, tree, options=osl.WriteOptions(layout="sharded"))
    if jax.process_index() == process:
        owner, name = {
            "plan": (PreparedSave, "of"),
            "capture": (PreparedSave, "capture"),
            "convert": (ResumableFile, "write_at"),
        }.get(kind, (LocalFileWriter, "write_at"))
        setattr(owner, name, die)
    begin = time.monotonic()
    try:
        if kind == "consolidate":
            osl.consolidate(target, options=osl.WriteOptions(max_file_bytes=200_000))
        elif kind == "convert":
            options = osl.ConvertOptions(memory_budget_bytes=1 << 20)
            osl.convert(path, target, format="hf", overwrite=True, options=options)
        elif kind == "capture":
            import orbax.checkpoint as ocp

            handler = osl.SafetensorsCheckpointHandler()
            handler.save(target, ocp.args.StandardSave(tree))
        else:
            options = osl.WriteOptions(layout="sharded")
            osl.save(target, tree, overwrite=True, options=options)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    seconds = time.monotonic() - begin
    if not jax.process_index():
        time.sleep(3)  # JAX ends the others at once where this process ends before them
    return text, seconds, sorted(osl.load(target)) == sorted(tree)

import json
import os
import signal

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.adapters.orbax_format import orbax_reader, orbax_target
from orbax_safetensors_layout.conversion import journal, pipeline
from orbax_safetensors_layout.storage import local, local_write


def watched(kind, name, kill, count, before=None, after=None):
    real = getattr(kind, name)

    def call(self, *arguments, **keywords):
        if count[0] == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        if before:
            before(self, *arguments)
        result = real(self, *arguments, **keywords)
        if after:
            after(self, *arguments)
        return result

    setattr(kind, name, call)


def main(log, source, target, form, kill):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def record(*values):
        os.write(file, (json.dumps(values) + "\n").encode())

    count = [0]
    watched(
        local.LocalStorage,
        "read_into",
        kill,
        count,
        lambda self, file, offset, buffers: record(
            "read", file, offset, offset + sum(len(b) for b in buffers)
        ),
    )
    watched(
        orbax_reader.OrbaxReader,
        "read",
        kill,
        count,
        lambda self, blocks: [
            record("read", a.stored, list(b.start), list(b.stop)) for a, b in blocks
        ],
    )
    watched(local_write.ResumableFile, "write_at", kill, count)
    watched(local_write.ResumableFile, "flush", kill, count)
    watched(orbax_target.OrbaxTarget, "write", kill, count)
    watched(orbax_target.OrbaxTarget, "commit", kill, count, None, lambda *_: record("committed"))
    watched(
        journal.Journal, "_write", kill, count, None, lambda self, line: record("recorded", line)
    )
    watched(pipeline.Conversion, "_commit", kill, count)
    options = osl.ConvertOptions(memory_budget_bytes=128 << 10)  # blocks of 8 KiB
    done = osl.convert(source, target, format=form, mesh={"fsdp": 4}, options=options)
    record("end", count[0], done.resumed_bytes)

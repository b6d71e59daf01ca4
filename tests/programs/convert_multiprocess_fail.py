import jax

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import ResumableFile


def main(checkpoint, target):
    options = osl.ConvertOptions(memory_budget_bytes=64 << 10)
    real = ResumableFile.write_at

    def broken(self, offset, buffers):
        if jax.process_index() == 1 and offset > 200_000:
            raise OSError("the disk is full")
        real(self, offset, buffers)

    ResumableFile.write_at = broken
    try:
        osl.convert(checkpoint, target, format="hf", options=options)
    except (osl.PeerError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    ResumableFile.write_at = real
    done = osl.convert(checkpoint, target, format="hf", options=options)
    return [text, done.resumed_bytes]

from recording import recording

import orbax_safetensors_layout as osl


def main(checkpoint, there, back, form):
    options = osl.ConvertOptions(memory_budget_bytes=256 << 10)
    with recording() as storage:
        osl.convert(checkpoint, there, format=form, mesh={"fsdp": 4}, processes=2, options=options)
    read = sum(b - a for file, a, b in storage.tensor_ranges() if file.startswith(checkpoint))
    osl.convert(there, back, options=options)
    return read

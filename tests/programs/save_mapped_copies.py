import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(target):
    """Save leaves that are tied, repeated, and cut over the processes in different ways."""
    embed = np.arange(32, dtype=np.float32).reshape(8, 4)
    kv = np.arange(6, dtype=np.float32).reshape(2, 3)
    mapping = osl.Mapping(
        [
            osl.rule("embed", osl.tensor("e")),
            osl.rule("head", osl.tensor("e").transpose(), tied_to="embed"),
            osl.rule("kv", osl.tensor("kv").repeat(0, 2)),
        ]
    )
    mesh = jax.make_mesh((4,), ("x",))
    outcomes = []
    for number, (head_at, kv_at) in enumerate([(None, None), ((3, 7), None), (None, (3, 2))]):
        head, repeated = embed.T.copy(), kv.repeat(2, 0)
        if head_at:
            head[head_at] += 1
        if kv_at:
            repeated[kv_at] += 1
        values = {"embed": embed, "head": head, "kv": repeated}
        tree = {
            name: jax.make_array_from_callback(
                value.shape, NamedSharding(mesh, P("x")), lambda index, value=value: value[index]
            )
            for name, value in values.items()
        }
        try:
            osl.save(f"{target}/{number}", tree, mapping=mapping)
            outcomes.append("saved")
        except osl.SafetensorsLayoutError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes

import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from orbax_safetensors_layout.errors import PeerError
from orbax_safetensors_layout.reading import DistributedStore, values_on_all
from orbax_safetensors_layout.runtime import ProcessGroup


def main():
    """Gather while process 1 does not come, then again; return the error, its seconds, if any."""
    process = jax.process_index()
    expected = np.arange(8, dtype=np.uint8)  # for which a CPU device waits in the call itself
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    value = jax.make_array_from_callback((8,), sharding, lambda index: expected[index])

    def gather(late):
        group = ProcessGroup("model", process, 2, DistributedStore.connect(), 2)
        began = time.monotonic()
        try:
            with group:
                if late and process:
                    time.sleep(4)
                values = values_on_all(value, group, "gathering")
            assert values.tobytes() == expected.tobytes()
        except PeerError as error:
            return str(error), time.monotonic() - began
        return None

    found = [gather(late=True)]
    time.sleep(3 - 2 * process)
    return [*found, gather(late=False)]

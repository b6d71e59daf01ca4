import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.conversion import difference, versions


def placed(factor, spec, devices):
    host = np.arange(16, dtype=np.float32).reshape(4, 4) * factor
    sharding = NamedSharding(Mesh(np.array(devices).reshape(-1, 2), ("p", "d")), spec)
    shards = [
        jax.device_put(host[index], device)
        for device, index in sharding.addressable_devices_indices_map(host.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(
        host.shape, sharding, shards, **({} if shards else {"dtype": host.dtype})
    )


def outcome(call):
    begun = time.monotonic()
    try:
        result = call().version
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, time.monotonic() - begun


def main(target):
    """Something fails, or is otherwise, on process 1 alone; return what comes of it."""
    trees = [{"w": placed(n, P("p", "d"), jax.devices())} for n in (1, 2)]
    for tree in trees:
        osl.publish(target, tree)
    first = osl.pull(target, trees[0], version=1)
    is_odd = jax.process_index() == 1
    found = {
        "differs": outcome(lambda: osl.pull(target, osl.Pulled(2, trees[1]) if is_odd else first)),
        "held by 1": outcome(lambda: osl.pull(target, first if is_odd else trees[0])),
        "held by 0": outcome(lambda: osl.pull(target, trees[0] if is_odd else first)),
    }

    def fail(*args, **kwargs):
        raise OSError("the disk is gone")

    for module, name in ((versions, "read_file"), (difference, "apply_difference")):
        whole = getattr(module, name)
        if is_odd:
            setattr(module, name, fail)
        for into in (trees[0], first):
            key = f"{name} {'in place' if into is first else 'anew'}"
            found[key] = outcome(lambda into=into: osl.pull(target, into))
        key = f"{name} of a version"
        found[key] = outcome(lambda: osl.pull(target, trees[0], version=2))
        setattr(module, name, whole)

    one = {**trees[0], "one": placed(1, P(), jax.devices()[:2])}
    other = f"{target}-one"
    osl.publish(other, one)
    held = osl.pull(other, one)
    found["shared"] = outcome(lambda: osl.Pulled(osl.publish(other, one)))
    again = {**trees[1], "one": one["one"]}
    osl.publish(other, again, whole_every=1)
    found["pulled"] = outcome(lambda: osl.pull(other, held))
    return found

"""Orbax's own paths in buckets: what its path layer does there, and this package's files in it."""

from __future__ import annotations

import backends
import pytest
from programs import run_processes

for library in ("gcsfs", "s3fs"):
    pytest.importorskip(library, reason="epath needs it for buckets")

# fsspec, which epath stands on there, remembers listings and does not see what others write.
PRELUDE = """
import fsspec
for kind in ("gs", "gcs", "s3"):
    fsspec.config.conf[kind] = {"use_listings_cache": False}

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax_safetensors_layout as osl

def make_state(step):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8) + step
    sharding = NamedSharding(mesh, P("x"))
    array = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    return {"weight": array, "step": step}

def same(found, step):
    pairs = zip(
        found["weight"].addressable_shards, make_state(step)["weight"].addressable_shards
    )
    return found["step"] == step and all(
        np.array_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs
    )
"""

MANAGER = (
    PRELUDE
    + """
def main(root, atomicity):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        atomicity_options=ocp.options.AtomicityOptions(
            mode=ocp.options.AtomicityMode(atomicity)
        ),
    )
    registry = osl.handler_registry("default")
    path = epath.Path(root)
    with ocp.CheckpointManager(path, options=options, handler_registry=registry) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(make_state(step)))
        manager.wait_until_finished()
        kept = list(manager.all_steps())
    with ocp.CheckpointManager(path, options=options, handler_registry=registry) as manager:
        found = manager.restore(3, args=ocp.args.StandardRestore(make_state(0)))
        return [kept, list(manager.all_steps()), same(found, 3)]
"""
)

V1 = (
    PRELUDE
    + """
def main(root, atomicity):
    osl.install()
    path = epath.Path(root)
    done = []
    context = ocp_v1.Context()
    context.checkpoint_layout = "safetensors"
    context.atomicity.mode = atomicity
    with context:
        ocp_v1.save(path / "saved", make_state(4))
        done.append(same(ocp_v1.load(path / "saved", make_state(0)), 4))
        done.append(ocp_v1.metadata(path / "saved").metadata["weight"].shape == (8, 8))
    auto = ocp_v1.Context()
    auto.checkpoint_layout = "auto"
    osl.save(path / "direct", make_state(5))
    with auto:
        done.append(same(ocp_v1.load(path / "direct", make_state(0)), 5))
    context = osl.context("state")
    context.atomicity.mode = atomicity
    with ocp_v1.training.Checkpointer(path / "run", context=context) as training:
        training.save(0, make_state(6))
        done.append(same(training.load(0, make_state(0)), 6))
        done.append(training.latest is not None)
    (path / "run" / "0" / "commit_success.txt").unlink()
    with ocp_v1.training.Checkpointer(path / "run", context=context) as training:
        done.append(training.latest is None)
    return done
"""
)


@pytest.fixture(scope="module", params=backends.REMOTE)
def server(request):
    with backends.running(request.param) as running:
        yield running


@pytest.fixture
def place(server, tmp_path):
    with backends.place(server, tmp_path / "unused") as found:
        yield found


def atomicity(place):
    """Orbax commits by a file on gs:// by itself; for s3:// it has to be told."""
    return "auto" if place.server.kind == "gs" else "commit_file"


def test_a_checkpoint_manager_of_two_processes(place):
    done = run_processes(
        MANAGER, processes=2, devices=2, root=place.url, atomicity=atomicity(place)
    )
    assert done == [[[2, 3], [2, 3], True]] * 2
    names = place.names()
    assert {name.partition("/")[0] for name in names} == {"2", "3"}
    for step in ("2", "3"):
        assert f"{step}/commit_success.txt" in names
        assert f"{step}/default/model.safetensors" in names


def test_v1_and_steps_without_their_commit_file(place):
    done = run_processes(V1, processes=1, devices=4, root=place.url, atomicity=atomicity(place))
    assert done == [[True] * 6]
    assert "saved/commit_success.txt" in place.names()

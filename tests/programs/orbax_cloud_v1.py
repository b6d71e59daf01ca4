import orbax.checkpoint.experimental.v1 as ocp_v1
from bucket_states import make_state, same
from etils import epath

import orbax_safetensors_layout as osl


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

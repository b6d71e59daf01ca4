import sys

sys.modules["jax"] = sys.modules["jaxlib"] = sys.modules["orbax"] = None
from orbax_safetensors_layout.cli import main  # noqa: E402

assert main(["plan", sys.argv[1], "--mesh", "a=4"]) == 0
assert main(["inspect", sys.argv[1]]) == 0

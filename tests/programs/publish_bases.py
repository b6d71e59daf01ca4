import jax
import numpy as np

import orbax_safetensors_layout as osl


def main(folder):
    """Publishes differences to a base that each process has of its own; returns the error."""
    values = {"a": 5, "b": 6, "c": 7}
    tree = {name: np.full((8, 8), value, np.float32) for name, value in values.items()}
    base = f"{folder}/base{jax.process_index()}"
    try:
        return str(osl.publish(f"{folder}/all", tree, base=base))
    except osl.SafetensorsLayoutError as error:
        return str(error)

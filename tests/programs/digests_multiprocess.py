import orbax_safetensors_layout as osl


def main(verb, calls, options):
    """Return how each call ends: None, or the error as text."""
    ends = []
    for source, target in calls:
        try:
            getattr(osl, verb)(source, target, **options)
        except osl.SafetensorsLayoutError as error:
            ends.append(f"{type(error).__name__}: {error}")
        else:
            ends.append(None)
    return ends

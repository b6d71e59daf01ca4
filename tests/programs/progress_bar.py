from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.runtime import progress_callback

with progress_callback(True, "nothing to do"):
    pass
with progress_callback(True) as report:
    report(Progress(5, 10, "some.weight"))
    report(Progress(10, 10, "some.weight"))
    report(Progress(7, 7, "model.language_model.layers.0.post_attention_layernorm.next.phase"))

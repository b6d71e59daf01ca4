import orbax_safetensors_layout as osl

osl.load("hf://org/model")

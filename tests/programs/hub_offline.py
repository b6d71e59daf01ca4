import orbax_safetensors_layout as osl

try:
    osl.load("hf://org/model")
except osl.StorageError as error:
    print(error)

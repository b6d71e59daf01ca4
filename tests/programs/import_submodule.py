import sys

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.load

assert callable(osl.load), osl.load
assert osl.load is sys.modules["orbax_safetensors_layout.load"].load

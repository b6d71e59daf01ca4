import re
import sys

sys.path.insert(0, sys.argv[1])
import deepseek
import llama405b


def make_some_layers(folder):
    tensors = deepseek.deepseek_tensors()
    kept = [t for t in tensors if not re.search("layers\\.([7-9]|[1-5][0-9]|60)\\.", t.name)]
    deepseek.make_index(folder, kept, files=22)


make = {"deepseek": deepseek.make_deepseek_index, "llama": llama405b.make_llama_index}
make["deepseek, 8 layers"] = make_some_layers
make[sys.argv[2]](sys.argv[3])

from mapped_llama import abstract, saved_mapping as mapping

import orbax_safetensors_layout as osl


def main(path, target):
    tree = osl.load(path, abstract(path, "both"), mapping=mapping())
    osl.save(target, tree, mapping=mapping(), options=osl.WriteOptions(dtype="bfloat16"))

from mapped_llama import abstract_llama, saved_mapping as mapping

import orbax_safetensors_layout as osl


def main(path, target):
    tree = osl.load(path, abstract_llama(path, "both"), mapping=mapping())
    osl.save(target, tree, mapping=mapping(), options=osl.WriteOptions(dtype="bfloat16"))

from mapped_llama import abstract_llama, saved_mapping as mapping

import orbax_safetensors_layout as osl


def main(path, target, split):
    tree = osl.load(path, abstract_llama(path, split), mapping=mapping())
    options = osl.WriteOptions(max_file_bytes=40_000)
    osl.save(target, tree, mapping=mapping(), options=options)
    return osl.plan_save(tree, mapping=mapping(), options=options).cost().written_bytes

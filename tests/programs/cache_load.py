import hashlib

from fork_server import kill_at, say

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.load
import orbax_safetensors_layout.storage.web  # in the server, once for all


def main(url, cache, cache_bytes, kill=-1, only=None):
    options = osl.ReadOptions(
        cache=cache, cache_bytes=cache_bytes, concurrency=3, request_bytes=500_000
    )
    count = kill_at(kill)
    say("begin")
    tensors = osl.load(url, only=only, options=options)
    say(count[0])
    say({name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()})

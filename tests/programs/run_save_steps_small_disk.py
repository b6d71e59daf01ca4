import json
import sys

from programs import run_processes

root, processes = sys.argv[1:]
results = run_processes("save_steps_small_disk.py", processes=int(processes), devices=2, root=root)
print(json.dumps(results))

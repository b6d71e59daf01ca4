import runpy
import sys

for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")

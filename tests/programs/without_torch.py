import runpy
import sys

sys.modules["torch"] = sys.modules["transformers"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")

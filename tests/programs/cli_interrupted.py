import os
import signal
import sys

from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.writing.open_files import FileSet

begin = FileSet.begin


def interrupted(self, plan):
    found = begin(self, plan)
    os.kill(os.getpid(), signal.SIGINT)
    return found


FileSet.begin = interrupted
sys.exit(main(sys.argv[1:]))

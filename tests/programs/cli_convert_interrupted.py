import os
import signal
import sys

from orbax_safetensors_layout import cli
from orbax_safetensors_layout.conversion import journal

real = journal.Journal.add


def add(self, group, digests):
    real(self, group, digests)
    if group == 2:
        os.kill(os.getpid(), signal.SIGINT)


journal.Journal.add = add
sys.exit(cli.main(sys.argv[1:]))
